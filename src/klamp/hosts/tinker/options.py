"""The configuration of a call of the loss: checked once, turned into the core's objective, and put into words."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args

from klamp.config import KLConfig, LossConfig
from klamp.config.describe import describe_average
from klamp.config.fields import host_refusals, ignored_fields
from klamp.config.kl import check_beta
from klamp.config.loss import build_objective
from klamp.config.teacher import TeacherConfig, of_a_server
from klamp.core.arguments import AT_LEAST_1, check_instance, check_number
from klamp.core.masking import Totals, check_totals
from klamp.core.objective import Objective
from klamp.core.surrogates import check_clip_range
from klamp.errors import ConfigError, KLWarning, Refusal, check_name, refuse
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.common.versions import told_version
from klamp.hosts.tinker.datums import Rows, read_rows

Normalizer: TypeAlias = Literal["loss_type", "token_sum"]
"""The average that the loss type names, or a plain sum over all tokens, as the service's built-in losses compute."""


class Options(TypedDict, total=False):
    """The further arguments of `compute_grpo_kl_loss`."""

    loss: LossConfig | None
    teacher: TeacherConfig | None
    normalizer: Normalizer
    max_length: int | None
    group_size: int | None
    totals: Totals | None


PLAIN_SUM = Totals(sequences=1.0, tokens=1.0, kl_tokens=1.0)
"""A mean over the tokens of a step with one token is a sum."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a loss is computed with, checked."""

    objective: Objective
    kl: KLConfig
    teacher: TeacherConfig | None
    """The teacher; None: there is none, or its coefficient is 0."""
    totals: Totals | None
    group_size: int | None
    ignored: tuple[str, ...]

    @property
    def head(self) -> TeacherConfig | None:
        """The teacher if its KL is computed over a head; None: there is none, or its KL is of the sampled tokens."""
        return self.teacher if self.teacher is not None and self.teacher.teacher_estimator == "topk" else None

    def read(self, data: Sequence[Any]) -> Rows:
        """Read the datums and check that they hold what this loss needs: no anchor whose KL is in the rewards."""
        anchors = {each.term.anchor for each in self.objective.terms if each.term.placement != "reward"}
        return read_rows(
            data,
            reference="reference" in anchors,
            teacher="teacher" in anchors,
            exclusions=self.objective.beta > 0 and self.kl.excludes,
            top_k=0 if self.head is None else self.head.teacher_top_k,
        )


def make_settings(
    kl_coef: float | None = None,
    cliprange: float | None = None,
    kl: KLConfig | None = None,
    *,
    loss: LossConfig | None = None,
    teacher: TeacherConfig | None = None,
    normalizer: Normalizer = "loss_type",
    max_length: int | None = None,
    group_size: int | None = None,
    totals: Totals | None = None,
) -> LossSettings:
    """The settings that the arguments of `compute_grpo_kl_loss` describe; see there."""
    kl, around = KLConfig() if kl is None else kl, _policy_loss(loss, cliprange)
    check_instance("kl", kl, KLConfig)
    if teacher is not None:
        check_instance("teacher", teacher, TeacherConfig)
        teacher = teacher if teacher.there else None
    if kl_coef is not None:
        check_beta(kl_coef, name="kl_coef")
    beta = kl.beta if kl_coef is None else float(kl_coef)
    check_name("normalizer", normalizer, get_args(Normalizer))
    check_number("group_size", group_size, AT_LEAST_1, whole=True, optional=True)
    if totals is not None:
        check_totals(totals)
    refuse(_refusals(beta, kl, teacher, normalizer))
    ignored = _without_effect(kl_coef, kl, loss, teacher)
    for text in ignored:
        warnings.warn(text, KLWarning, stacklevel=3)
    objective = build_objective(kl, around, max_length=1 if max_length is None else max_length, teacher=teacher)
    objective = replace(objective, beta=beta, max_length=max_length)
    if normalizer == "token_sum":
        objective, totals = replace(objective, reduction="token_mean"), PLAIN_SUM
    return LossSettings(
        objective=objective,
        kl=kl,
        teacher=teacher,
        totals=totals,
        group_size=group_size,
        ignored=ignored,
    )


def _policy_loss(loss: LossConfig | None, cliprange: float | None) -> LossConfig:
    """The policy loss; without a configuration PPO's with this bound, as a mean over the tokens."""
    if loss is not None:
        check_instance("loss", loss, LossConfig)
        if cliprange is not None:
            raise ConfigError(
                "cliprange and loss both give the bounds of the ratio",
                got=f"cliprange={cliprange}, epsilon={loss.epsilon}, epsilon_high={loss.epsilon_high}",
                why="only one of them can be in force",
                fix="leave cliprange out",
            )
        return loss
    bound = 0.2 if cliprange is None else cliprange
    check_clip_range(bound, bound)
    return LossConfig(loss_type="dapo", epsilon=bound, scale_rewards="none")


def _refusals(beta: float, kl: KLConfig, teacher: TeacherConfig | None, normalizer: Normalizer) -> list[Refusal]:
    return [
        *([] if teacher is None else [of_a_server(teacher, teacher.there, who="a sampling client")]),
        *(host_refusals(kl, "Tinker") if beta > 0 else ()),
        Refusal(
            normalizer == "token_sum" and kl.kl_normalizer is not None,
            "normalizer='token_sum' cannot be combined with kl_normalizer",
            got=f"kl_normalizer={kl.kl_normalizer!r}",
            why="the sum of the policy loss and a mean of the KL would weigh beta by the number of tokens",
            fix="leave kl_normalizer out",
        ),
    ]


def effective(
    kl_coef: float | None = None,
    cliprange: float | None = None,
    kl: KLConfig | None = None,
    **options: Unpack[Options],
) -> Effective:
    """What the KL of a call of `compute_grpo_kl_loss` with these arguments will really do; needs no datums, no SDK.

    Raises:
        UnknownNameError, ConfigError: arguments that the call would refuse.
    """
    settings = make_settings(kl_coef, cliprange, kl, **options)
    kl, teacher, beta = settings.kl, settings.teacher, settings.objective.beta
    terms: list[EffectiveTerm] = []
    if beta > 0:
        moved = "fixed" if kl_coef is None else "the caller's: each call is passed its kl_coef"
        terms.append(EffectiveTerm.of(kl, beta=beta, price=_price(settings.objective), controller=moved))
    if teacher is not None:
        row = "teacher_logprobs" if settings.head is None else "teacher_head"
        terms.append(EffectiveTerm.to_teacher(teacher, who=f"{row} of the datums", coefficient=teacher.teacher_coef))
    average = describe_average(settings.objective.reduction, over="the call, or of totals=", length="max_length")
    if settings.totals is PLAIN_SUM:
        average = "sum over the tokens of the call"
    reference = "logprobs of the datums: the sampler" if kl.reference == "sampler" else "ref_logprobs of the datums"
    return Effective(
        host=f"{told_version('tinker')}, forward_backward_custom",
        terms=tuple(terms),
        normalizer=average,
        reference=reference if beta > 0 else "none is read: the coefficient is 0",
        notes=settings.ignored,
    )


def _price(objective: Objective) -> str:
    """The price where a call alone determines it; its advantages are the caller's."""
    term = objective.kl
    if term.placement == "loss" and term.normalizer not in (None, objective.reduction):
        return "unknown: the KL has an average of its own, and the caller forms the advantages"
    price = f"{objective.beta:g} reward per nat of a whole completion"
    if term.placement == "reward":
        return price
    return f"{price}, if advantages are rewards less the mean of the others; for any other it is unknown here"


def _without_effect(
    kl_coef: float | None, kl: KLConfig, loss: LossConfig | None, teacher: TeacherConfig | None
) -> tuple[str, ...]:
    in_reward = kl.kl_placement == "reward" or (teacher is not None and teacher.teacher_placement == "reward")
    moves = kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0
    grows = teacher is not None and (teacher.teacher_schedule != "constant" or teacher.teacher_warmup_steps > 0)
    unread = [name for name in ignored_fields(kl, "tinker") if (name, kl.reference) != ("reference", "sampler")]
    unread += [] if loss is None else ignored_fields(loss, "tinker")
    return that_apply([
        (in_reward, "placement 'reward': the loss adds nothing. Take coefficient * (sum of logprobs - sum of the "
         "anchor's) from each reward before you form advantages, or use placement 'advantage'"),
        (moves and kl_coef is None, "a call keeps no state: nothing moves beta, unless the caller passes "
         "kl_coef=controller.value, with controller = kl.build_controller()"),
        (grows, "a call keeps no state: nothing moves teacher_coef, unless the caller passes a teacher with "
         "teacher_coef=teacher.coefficient(step, steps), and without schedule and warm-up"),
        (bool(unread), f"without effect here: {', '.join(unread)}"),
    ])  # fmt: skip
