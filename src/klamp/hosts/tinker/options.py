"""The options of the loss: checked once, turned into the core's objective, and said in words (`effective`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args

from klamp.config import KLConfig
from klamp.config.describe import describe_average, describe_clip, describe_price
from klamp.config.loss import price_of
from klamp.config.rules import check_beta
from klamp.config.teacher import NUMBERS, TeacherConfig, of_a_server
from klamp.core.arguments import AT_LEAST_1, check_instance, check_number, describe
from klamp.core.masking import Totals, check_totals
from klamp.core.objective import Objective, SurrogateName, Weighted
from klamp.core.surrogates import check_clip_range
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KLWarning, check_name, refuse
from klamp.hosts.common.effective import Effective, EffectiveTerm, that_apply
from klamp.hosts.common.versions import told_version
from klamp.hosts.tinker.datums import Rows, as_length, read_rows

Normalizer: TypeAlias = Literal[Reduction, "token_sum"]
"""The core's reductions, and `token_sum`: a plain sum over all tokens, as the service's built-in losses."""


class _Unset(float):
    """A default value that is told apart from the same number given on purpose."""


KL_COEF = _Unset(KLConfig.beta)


class LossOptions(TypedDict, total=False):
    """The arguments by name of `compute_grpo_kl_loss`, `forward_backward_kl` and `effective`; each may be left out."""

    beta: float | None
    """Coefficient in force instead of `kl.beta`: the value of a controller or schedule."""
    normalizer: Normalizer
    """token_mean (the default), sequence_mean, sequence_sum, fixed_length, or token_sum (a plain sum)."""
    surrogate: SurrogateName
    """ppo_clip (the default), cispo or score_function."""
    max_length: int | None
    """L of `fixed_length`, in tokens."""
    group_size: int | None
    """Datums per prompt, next to each other; a clip of the KL (`kl_clip_method`) needs it."""
    reference_length: float | Sequence[float] | None
    """Tokens that turn a threshold per token into a budget; a number, or one per datum."""
    totals: Totals | None
    """Size of the whole step (`count_tokens`) when several calls share one `optim_step`."""
    teacher: TeacherConfig | None
    """The KL to a teacher: k1 or k3 of the datums' teacher_logprobs, or topk of their teacher_head."""
    teacher_coef: float | None
    """Coefficient in force instead of `teacher.teacher_coef`: the value of a schedule."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a loss is computed with, checked."""

    objective: Objective
    totals: Totals | None
    group_size: int | None
    reference_length: float | Sequence[float] | None
    reads_reference: bool
    reads_teacher: bool
    reads_exclusions: bool
    head: TeacherConfig | None
    """The teacher whose KL is that of a head; None: there is none, or its KL is of the sampled tokens."""

    def read(self, data: Sequence[Any]) -> Rows:
        """Read the datums and check that they hold what this loss needs."""
        rows = read_rows(
            data,
            reference=self.reads_reference,
            teacher=self.reads_teacher,
            exclusions=self.reads_exclusions,
            top_k=0 if self.head is None else self.head.teacher_top_k,
        )
        as_length(self.reference_length, len(rows.lengths))
        return rows


def make_settings(
    kl_coef: float = KL_COEF,
    cliprange: float | tuple[float, float] = 0.2,
    kl: KLConfig | None = None,
    **options: Unpack[LossOptions],
) -> LossSettings:
    """The settings that the arguments of `compute_grpo_kl_loss` describe; see there."""
    for name in options:
        check_name("argument of compute_grpo_kl_loss", name, LossOptions.__annotations__)
    kl = merge_coefficients(kl_coef, kl)
    now = in_force(kl, options.get("beta"))
    low, high = _bounds(cliprange)
    check_number("group_size", options.get("group_size"), AT_LEAST_1, whole=True, optional=True)
    reduction, totals = _reduction(options.get("normalizer", "token_mean"), kl, options.get("totals"))
    for text in _unheard(kl, options):
        warnings.warn(text, KLWarning, stacklevel=3)
    teacher = options.get("teacher")
    in_use, others = now > 0, _teacher(teacher, options.get("teacher_coef"))
    head = None
    if teacher is not None and teacher.teacher_estimator == "topk" and (teacher.there or others[0].coefficient > 0):
        head = teacher
    if in_use and kl.kl_estimator == "exact":
        raise ConfigError(
            "kl_estimator='exact' cannot be computed through Tinker",
            got=f"beta={now:g}",
            why="the service returns the log-probabilities of chosen tokens, not whole rows of logits",
            fix="use kl_estimator='k3' (its value is unbiased, its gradient the same in expectation)",
        )
    return LossSettings(
        objective=Objective(
            surrogate=options.get("surrogate", Objective.surrogate),
            clip_low=low,
            clip_high=high,
            reduction=reduction,
            max_length=options.get("max_length"),
            beta=now,
            kl=kl.build_term(),
            others=others,
        ),
        totals=totals,
        group_size=options.get("group_size"),
        reference_length=reference_length_of(kl, options.get("reference_length")),
        reads_reference=in_use and kl.kl_placement != "reward",
        reads_teacher=head is not None
        or any(each.coefficient > 0 and each.term.placement != "reward" for each in others),
        reads_exclusions=in_use and kl.excludes,
        head=head,
    )


def _teacher(teacher: TeacherConfig | None, coefficient: float | None) -> tuple[Weighted, ...]:
    """The KL to a teacher with the coefficient that is in force; none where there is no teacher.

    Raises:
        ConfigError: an estimator that needs more than a sampling client tells.
    """
    if teacher is None:
        return ()
    check_instance("teacher", teacher, TeacherConfig)
    now = in_force(teacher, coefficient)
    refuse([of_a_server(teacher, now > 0 or teacher.there, who="a sampling client")])
    return (Weighted(now, teacher.build_term()),)


def merge_coefficients(kl_coef: float, kl: KLConfig | None) -> KLConfig:
    """One configuration from a coefficient and a configuration, which may hold another one.

    Raises:
        ConfigError: the two differ, or one of them is something else.
    """
    check_beta(kl_coef, name="kl_coef")
    if kl is None:
        return KLConfig(beta=float(kl_coef))
    check_instance("kl", kl, KLConfig)
    if not isinstance(kl_coef, _Unset) and kl_coef != kl.beta:
        raise ConfigError(
            "kl_coef and kl.beta are two names of one coefficient, with different values",
            got=f"kl_coef={kl_coef}, kl.beta={kl.beta}",
            why="only one of them can be in force",
            fix="leave kl_coef out; for the value of a controller pass beta=controller.value",
        )
    return kl


def in_force(kl: KLConfig | TeacherConfig, beta: float | None) -> float:
    """The coefficient to use now: a controller's or schedule's if there is one, else the configuration's.

    Raises:
        ConfigError: a coefficient that is no number >= 0.
    """
    if beta is None:
        return kl.beta if isinstance(kl, KLConfig) else kl.teacher_coef
    if isinstance(kl, KLConfig):
        check_beta(beta, fix="pass the controller's value")
    else:
        check_number("teacher_coef", beta, NUMBERS["teacher_coef"])
    return float(beta)


def reference_length_of(kl: KLConfig | None, given: float | Sequence[float] | None) -> float | Sequence[float] | None:
    """The reference length in tokens that a call works with: the one that it is given, else the configuration's."""
    return kl.kl_reference_length if given is None and kl is not None else given


def _bounds(cliprange: float | tuple[float, float]) -> tuple[float, float]:
    """The bounds of the ratio below and above 1."""
    low_high = (cliprange, cliprange) if isinstance(cliprange, int | float) else cliprange
    if not isinstance(low_high, tuple | list) or len(low_high) != 2:
        raise ConfigError(
            "cliprange must be a number, or two: below 1 and above 1",
            got=describe(cliprange),
            why="the ratio of policy and sampler is clipped to [1 - below, 1 + above]",
            fix="cliprange=0.2 is the default, cliprange=(0.2, 0.28) that of DAPO",
        )
    check_clip_range(*low_high)
    return low_high[0], low_high[1]


def _reduction(normalizer: Normalizer, kl: KLConfig, totals: Totals | None) -> tuple[Reduction, Totals | None]:
    check_name("normalizer", normalizer, get_args(Normalizer))
    if totals is not None:
        check_totals(totals)
    if normalizer != "token_sum":
        return normalizer, totals
    if kl.kl_normalizer is not None:
        raise ConfigError(
            "normalizer='token_sum' cannot be combined with kl_normalizer",
            got=f"kl_normalizer={kl.kl_normalizer!r}",
            why="the sum of the policy loss and a mean of the KL would weigh beta by the number of tokens",
            fix="leave kl_normalizer out",
        )
    return "token_mean", Totals(sequences=1.0, tokens=1.0, kl_tokens=1.0)


OF_THE_DATUMS = "ref_logprobs of the datums, whoever computed them (compute_reference_logprobs)"
UNREAD = ("kl_early_stop", *(each.name for each in fields(KLConfig) if each.name.startswith("reference")))
"""Fields of `KLConfig` that no call of the loss looks at."""


def effective(
    kl_coef: float = KL_COEF,
    cliprange: float | tuple[float, float] = 0.2,
    kl: KLConfig | None = None,
    **options: Unpack[LossOptions],
) -> Effective:
    """What the KL of a call with these arguments will really do, in words; needs neither datums nor the SDK.

    Args:
        kl_coef: see `compute_grpo_kl_loss`.
        cliprange: see there.
        kl: see there.
        options: those of the call, see `LossOptions`.

    Raises:
        UnknownNameError, ConfigError: arguments that the call would refuse.
    """
    objective = make_settings(kl_coef, cliprange, kl, **options).objective
    beta = objective.beta
    kl = merge_coefficients(kl_coef, kl)
    length = reference_length_of(kl, options.get("reference_length"))
    term = EffectiveTerm.of(
        kl,
        beta=beta,
        price=_price(objective),
        controller="fixed" if options.get("beta") is None else "the caller's: each call is passed its beta",
        clip=describe_clip(kl, length="the datum's reference_length" if isinstance(length, Sequence) else length),
    )
    teacher = options.get("teacher")
    told = "teacher_logprobs" if teacher is None or teacher.teacher_estimator != "topk" else "teacher_head"
    taught = [
        EffectiveTerm.to_teacher(teacher, who=f"{told} of the datums", coefficient=now)
        for now, _ in objective.others
        if teacher is not None and now > 0
    ]
    return Effective(
        host=f"{told_version('tinker')}, forward_backward_custom",
        terms=(*([term] if beta > 0 else []), *taught),
        normalizer=_average(options),
        reference=OF_THE_DATUMS if beta > 0 else "none is read: the coefficient is 0",
        notes=_notes(kl, options) if beta > 0 else (),
    )


def _price(objective: Objective) -> str:
    """The price where a call alone tells it; its advantages are the caller's."""
    term = objective.kl
    price = price_of(objective.beta, placement=term.placement, baseline="leave_one_out", scale="none", group_size=2)
    text = describe_price(price, group_size=2)
    if term.placement == "reward":
        return text
    if term.placement == "loss" and term.normalizer not in (None, objective.reduction):
        return "unknown: the KL has an average of its own, and the caller forms the advantages"
    return f"{text}, if advantages are rewards less the mean of the others; for any other it is unknown here"


def _average(options: LossOptions) -> str:
    normalizer: Normalizer = options.get("normalizer", "token_mean")
    over = "the call" if options.get("totals") is None else "the step that totals= describes"
    if normalizer == "token_sum":
        return "sum over the tokens of the call (normalizer='token_sum')"
    length = "max_length" if options.get("max_length") is None else str(options.get("max_length"))
    return f"{describe_average(normalizer, over=over, length=length)} (normalizer={normalizer!r})"


def _unheard(kl: KLConfig, options: LossOptions) -> tuple[str, ...]:
    """What the configuration asks for and no call of the loss does."""
    moves = kl.controller_name != "fixed" or kl.kl_schedule != "constant" or kl.kl_warmup_steps > 0
    unread = [name for name in UNREAD if getattr(kl, name) != getattr(KLConfig, name)]
    teacher = options.get("teacher")
    grows = teacher is not None and (teacher.teacher_schedule != "constant" or teacher.teacher_warmup_steps > 0)
    return that_apply([
        (moves and options.get("beta") is None, "a call keeps no state: nothing moves beta, unless the caller passes "
         "beta=controller.value, with controller = kl.build_controller()"),
        (grows and options.get("teacher_coef") is None, "a call keeps no state: nothing moves teacher_coef, unless the "
         "caller passes teacher_coef=teacher.coefficient(step, steps)"),
        (bool(unread), f"without effect here: {', '.join(unread)}"),
    ])  # fmt: skip


def _notes(kl: KLConfig, options: LossOptions) -> tuple[str, ...]:
    own = kl.kl_normalizer
    return *_unheard(kl, options), *that_apply([
        (kl.kl_placement == "reward", "the loss adds nothing: penalize_rewards takes the KL from the rewards, before "
         "advantages that are not divided by the group's standard deviation"),
        (kl.kl_placement == "advantage", "the KL is the sampler's: datums go in as they were, not through "
         "shift_advantages as well"),
        (kl.kl_placement == "loss" and own is not None, f"the KL has an average of its own (kl_normalizer={own!r})"),
        (kl.kl_clip_method != "none" and options.get("group_size") is None, "the clip is gated on groups: without "
         "group_size the call is refused"),
        (kl.excludes, "which tokens carry no KL is what kl_mask of the datums says: build_datum(kl_mask=...)"),
    ])  # fmt: skip
