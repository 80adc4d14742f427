"""klamp's `grpo_loss` of datums for `forward_backward_custom`, what its arguments do, and the check of any loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import torch
from torch import Tensor

from klamp.audit.micro_batch import check as check_loss
from klamp.audit.verdict import Verdict
from klamp.config import KLConfig, LossConfig
from klamp.config.describe import describe_average
from klamp.config.fields import host_refusals, ignored_fields, unread
from klamp.config.kl import BETA
from klamp.config.loss import build_objective
from klamp.config.teacher import TeacherConfig, of_a_server
from klamp.core.arguments import AT_LEAST_1, check_fields, limited
from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import Totals, check_totals, masked_log_ratio, masked_mean, repeated_share, total_denominator
from klamp.core.objective import Objective, grpo_loss
from klamp.core.surrogates import CLIP_LOW
from klamp.core.topk import head_mass, topk_kl_of
from klamp.core.types import LossPart
from klamp.doctor.metrics import check_metrics
from klamp.errors import KLWarning, NonFiniteError, Refusal, refuse
from klamp.hosts.common.effective import Effective, EffectiveTerm
from klamp.hosts.common.versions import host_version, load_tinker
from klamp.hosts.tinker.datums import Rows, read_rows, with_inputs

Normalizer: TypeAlias = Literal["loss_type", "token_sum"]
"""The average that the loss type names, or a plain sum over all tokens, as the service's built-in losses compute."""
PLAIN_SUM = Totals(sequences=1.0, tokens=1.0, kl_tokens=1.0)
"""A mean over the tokens of a step with one token is a sum."""
A_TRAINER = "a trainer that takes steps: a call computes one loss of datums that are scored"
TEACHER_MOVES = dict.fromkeys(
    ("teacher_schedule", "teacher_warmup_steps"),
    "a caller that passes teacher_coef=teacher.coefficient(step, steps) in each call",
)
UNREAD_WITHOUT_KL_COEF: dict[str, str] = dict.fromkeys(
    ("kl_controller", "target_kl", "kl_schedule", "kl_warmup_steps"),
    "kl_coef=controller.value in each call, with controller = kl.build_controller()",
)
IN_REWARD: dict[str, str] = dict.fromkeys(
    ("kl_placement", "teacher_placement"),
    "a caller that takes coefficient * (sum of logprobs - sum of the anchor's) from each reward, before the advantages "
    "are formed; placement 'advantage' needs none",
)
"""What a KL in the reward needs, to which the loss adds nothing."""


class Options(TypedDict, total=False):
    """The further arguments of `compute_grpo_kl_loss`."""

    loss: LossConfig | None
    teacher: TeacherConfig | None
    normalizer: Normalizer
    max_length: int | None
    group_size: int | None
    totals: Totals | None


@dataclass(frozen=True)
class LossCall:
    """The arguments of `compute_grpo_kl_loss`, checked, and what follows from them; see there."""

    kl_coef: float | None = limited(None, BETA)
    cliprange: float | None = limited(None, CLIP_LOW)
    kl: KLConfig = KLConfig()  # noqa: RUF009  (frozen)
    loss: LossConfig | None = None
    teacher: TeacherConfig | None = None
    normalizer: Normalizer = "loss_type"
    max_length: int | None = limited(None, AT_LEAST_1)
    group_size: int | None = limited(None, AT_LEAST_1)
    totals: Totals | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.totals is not None:
            check_totals(self.totals)
        refuse(self._refusals())
        for note in self.notes:
            warnings.warn(note, KLWarning, stacklevel=4)

    @cached_property
    def objective(self) -> Objective:
        """The objective of `grpo_loss`; without `loss` PPO's as a mean over the tokens."""
        bound = LossConfig.epsilon if self.cliprange is None else self.cliprange
        loss = self.loss or LossConfig(loss_type="dapo", epsilon=bound, scale_rewards="none")
        length = 1 if self.max_length is None else self.max_length
        objective = build_objective(self.kl, loss, max_length=length, teacher=self.teacher)
        beta = objective.beta if self.kl_coef is None else float(self.kl_coef)
        objective = replace(objective.weighted(beta), max_length=self.max_length)
        return replace(objective, reduction="token_mean") if self.normalizer == "token_sum" else objective

    @property
    def whole(self) -> Totals | None:
        """What the sums over tokens are divided by; None: the counts of the datums."""
        return PLAIN_SUM if self.normalizer == "token_sum" else self.totals

    @property
    def head(self) -> TeacherConfig | None:
        """The teacher if its KL, or its baseline, is computed over a head; None: no teacher, or sampled tokens only."""
        teacher = self.teacher
        return teacher if teacher is not None and teacher.there and teacher.head_size is not None else None

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What has no effect, or another than its name suggests."""
        kl, teacher = self.kl, self.teacher if self.teacher is not None and self.teacher.there else TeacherConfig()
        loss = self.loss or LossConfig()
        needs = dict.fromkeys((*ignored_fields(kl, "tinker"), *ignored_fields(loss, "tinker")), A_TRAINER)
        needs |= TEACHER_MOVES | (UNREAD_WITHOUT_KL_COEF if self.kl_coef is None else {})
        if kl.reference == "sampler":
            needs.pop("reference", None)
        for config in (kl, teacher):
            needs |= {name: needed for name, needed in IN_REWARD.items() if getattr(config, name, None) == "reward"}
        return tuple(note for config in (kl, teacher, loss) for note in unread(config, needs))

    def _refusals(self) -> list[Refusal]:
        kl, teacher = self.kl, self.teacher
        return [
            *([] if teacher is None else [of_a_server(teacher, teacher.there, who="a sampling client")]),
            Refusal(
                self.cliprange is not None and self.loss is not None,
                "cliprange and loss both give the bounds of the ratio",
                got=f"cliprange={self.cliprange}, loss={self.loss}",
                why="only one of them can be in force",
                fix="leave cliprange out",
            ),
            *(host_refusals(kl, "Tinker") if self.objective.beta != 0 else ()),
            *(host_refusals(self.loss, "Tinker") if self.loss is not None else ()),
            Refusal(
                self.normalizer == "token_sum" and kl.kl_normalizer is not None,
                "normalizer='token_sum' cannot be combined with kl_normalizer",
                got=f"kl_normalizer={kl.kl_normalizer!r}",
                why="the sum of the policy loss and a mean of the KL would weigh beta by the number of tokens",
                fix="leave kl_normalizer out",
            ),
        ]

    def read(self, data: Sequence[Any]) -> Rows:
        """Read the datums and check that they hold what this loss needs: no anchor whose KL is in the rewards."""
        anchors = {term.anchor for _, term in self.objective.active if term.placement != "reward"}
        return read_rows(
            data,
            reference="reference" in anchors,
            teacher="teacher" in anchors,
            exclusions=self.objective.beta != 0 and self.kl.excludes,
            top_k=0 if self.head is None else self.head.teacher_top_k,
        )


def effective(
    kl_coef: float | None = None, cliprange: float | None = None, kl: KLConfig | None = None, **options: Unpack[Options]
) -> Effective:
    """What the KL of a call of `compute_grpo_kl_loss` with these arguments will really do; needs no datums, no SDK.

    Raises:
        UnknownNameError, ConfigError: arguments that the call would refuse.
    """
    call = LossCall(kl_coef, cliprange, kl or KLConfig(), **options)
    kl, teacher, beta = call.kl, call.teacher, call.objective.beta
    terms: list[EffectiveTerm] = []
    if beta != 0:
        moved = "fixed" if kl_coef is None else "the caller's: each call is passed its kl_coef"
        terms.append(EffectiveTerm.of(kl, beta=beta, price=_price(call.objective), controller=moved))
    if teacher is not None and teacher.there:
        row = "teacher_logprobs" if call.head is None else "teacher_head"
        terms.append(EffectiveTerm.to_teacher(teacher, who=f"{row} of the datums", coefficient=teacher.teacher_coef))
    average = describe_average(call.objective.reduction, over="the call, or of totals=", length="max_length")
    if call.whole is PLAIN_SUM:
        average = "sum over the tokens of the call"
    reference = "logprobs of the datums: the sampler" if kl.reference == "sampler" else "ref_logprobs of the datums"
    return Effective(
        host=f"{host_version('tinker')}, forward_backward_custom",
        terms=tuple(terms),
        normalizer=average,
        reference=reference if beta != 0 else "none is read: the coefficient is 0",
        notes=call.notes,
    )


def _price(objective: Objective) -> str:
    """The price where a call alone determines it; its advantages are the caller's."""
    term = objective.terms[0].term
    if term.placement == "loss" and term.normalizer not in (None, objective.reduction):
        return "unknown: the KL has an average of its own, and the caller forms the advantages"
    price = f"{objective.beta:g} reward per nat of a whole completion"
    if term.placement == "reward":
        return price
    return f"{price}, if advantages are rewards less the mean of the others; for any other it is unknown here"


def compute_grpo_kl_loss(
    data: Sequence[Any],
    logprobs_list: Sequence[Tensor],
    kl_coef: float | None = None,
    cliprange: float | None = None,
    kl: KLConfig | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, dict[str, float]]:
    """GRPO's clipped surrogate plus the KL, for `TrainingClient.forward_backward_custom`: klamp's `grpo_loss`.

    Equation: R[-min(r A, clip(r, 1 - low, 1 + high) A)] + beta R_kl[penalty], r = policy / sampler, penalty as in
    `kl_penalty`. Without `loss`, R is 1/n sum over the n trained tokens of `data`; the service's built-in losses are
    plain sums: at kl_coef 0 the built-in `ppo` gives n times this loss and gradient, and exactly this one with
    `normalizer="token_sum"`. What was divided by is in the metrics (`train/denominator`, `train/kl_denominator`); so is
    the KL of the sampler from the trainer (`sampler/k1`, `sampler/k3`).

    Sampler: whoever `logprobs` belong to; it is the old policy of the ratio and the sampler of `kl_off_policy`.
    Gradient: equal to `grpo_loss`'s. Every datum gets one, zeros where it trains no token.

    Args:
        data: datums as `build_datum` makes them; anything with `loss_fn_inputs` of 1-D tensors will do.
        logprobs_list: log-probabilities of `target_tokens` under the policy, one tensor per datum, with gradient; with
            teacher_estimator="topk" with the head's in front, [N, K + 1], as `forward_backward_kl` asks for them.
        kl_coef: coefficient of the KL per nat of a token, for instance a controller's value; None: `kl.beta`. With 0
            no `ref_logprobs` are needed.
        cliprange: ratio bound of PPO's loss as a mean over the tokens; None: 0.2.
        kl: every choice about the KL; None: klamp's default.
        options: `loss`, every choice about the policy loss, both bounds of the ratio included, instead of `cliprange`;
            `teacher`, the KL to a teacher (k1 or k3 of the datums' teacher_logprobs, or topk of their teacher_head);
            `normalizer`, "token_sum" for a plain sum over the tokens, as the built-in losses have it, else the average
            of `loss`; `max_length`, L of loss_type="dr_grpo", in tokens; `group_size`, datums per prompt, next to each
            other, which a clip of the KL (`kl_clip_method`) needs; `totals`, the size of the whole step
            (`count_tokens`) when several calls share one `optim_step`.

    Returns:
        The loss, and metrics as floats, names as in docs/metrics.md: `train/loss`, `train/kl_penalty`, `kl/k3`, ...

    Raises:
        UnknownNameError, ConfigError: an unknown choice, or one that cannot work here.
        DataError, ShapeError, NonFiniteError, EmptyMaskError: data that cannot be used; the datum is named.

    Source: the Tinker guide (docs/sources.md); PPO arXiv:1707.06347, DeepSeekMath arXiv:2402.03300
    """
    call = LossCall(kl_coef, cliprange, kl or KLConfig(), **options)
    return _loss(call.read(data), logprobs_list, call)


def _loss(rows: Rows, logprobs_list: Sequence[Tensor], call: LossCall) -> tuple[Tensor, dict[str, float]]:
    objective, wide = call.objective, rows.policy(logprobs_list)
    policy, teacher_kl, masses = wide[..., -1], None, dict[str, Tensor]()
    if call.head is not None:
        teacher_kl, masses = _head_kl(rows, wide, call.head)
    batch = rows.batch(
        policy, group_size=call.group_size, reference_length=call.kl.kl_reference_length, teacher_kl=teacher_kl
    )
    output = grpo_loss(batch, objective, totals=call.whole)
    _check_finite(output.loss, wide)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    metrics |= {f"teacher/{name}": float(masked_mean(mass, rows.mask)) for name, mass in masses.items()}
    if rows.teacher_logprobs is not None and (share := repeated_share(policy, rows.teacher_logprobs, rows.mask)) > 0:
        metrics["teacher/repeated"] = float(share)
    metrics |= {"beta": objective.beta, "train/loss": float(output.loss.detach())}
    metrics["train/denominator"] = _denominator(rows, call)
    if "train/kl_penalty" in metrics:
        metrics["train/kl_denominator"] = _denominator(rows, call, part="kl")
    check_metrics(metrics)
    return output.loss, metrics | _mismatch(rows, policy.detach())


def _head_kl(rows: Rows, policy: Tensor, teacher: TeacherConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to a teacher over the head of the datums, [B, N], and without gradient the head's mass in both models."""
    assert rows.teacher_logprobs is not None
    anchor = torch.cat([rows.head_logprobs, rows.teacher_logprobs[..., None]], -1)
    ids, valid = torch.cat([rows.head, rows.target_tokens[..., None]], -1), rows.head >= 0
    weight = None if teacher.teacher_off_policy == "none" else policy[..., -1].detach() - rows.logprobs
    tail = teacher.teacher_tail if teacher.teacher_estimator == "topk" else "bucket"
    how: Any = {"direction": teacher.teacher_direction, "tail": tail}
    kl = topk_kl_of(policy, anchor, ids, **how, log_weight=weight, kept=valid)
    if not teacher.teacher_top_k:
        return kl, {}
    return kl, {"student_mass": head_mass(policy[..., :-1], valid), "teacher_mass": head_mass(anchor[..., :-1], valid)}


def _check_finite(loss: Tensor, policy: Tensor) -> None:
    slope = torch.autograd.grad(loss, policy, retain_graph=True)[0] if loss.requires_grad else torch.zeros_like(policy)
    bad = (~slope.isfinite()).flatten(1).any(-1).nonzero().flatten().tolist()
    if bad or not bool(loss.detach().isfinite()):
        raise NonFiniteError(
            f"datum {bad[0]}: the gradient of the loss is not finite" if bad else "the loss is not finite",
            got=f"loss {float(loss.detach())}",
            why="log-probabilities of one token lie so far apart that their ratio overflows",
            fix="look for logprobs shifted by one token in the datums; kl_max_log_ratio bounds the KL's share",
        )


def count_tokens(data: Sequence[Any]) -> Totals:
    """The counts of a step for `totals=`, where several calls share one `optim_step`: sequences, tokens, KL tokens."""
    return read_rows(data).totals


def _denominator(rows: Rows, call: LossCall, *, part: LossPart = "policy") -> float:
    objective, totals = call.objective, call.whole or rows.totals
    reduction = (call.kl.kl_normalizer if part == "kl" else None) or objective.reduction
    return float(total_denominator(totals, reduction, length=objective.max_length, part=part))


def forward_backward_kl(
    client: Any,
    data: Sequence[Any],
    kl_coef: float | None = None,
    cliprange: float | None = None,
    kl: KLConfig | None = None,
    **options: Unpack[Options],
) -> Any:
    """Forward and backward pass of `compute_grpo_kl_loss` through a `TrainingClient`: the gradient adds up there.

    Two passes over the data: a forward, then a forward and backward. The data is checked before anything is sent. NaN
    in the service's answer raises NonFiniteError where the result is asked for: no gradient is sent, and SDKs from 0.36
    on then take no more requests on this client.

    Args:
        client: a `TrainingClient`, or the SDK's future of one, which is waited for: in async code await it before.
        data, kl_coef, cliprange, kl, options: as in `compute_grpo_kl_loss`.

    Returns:
        What the client returns: a future of `ForwardBackwardOutput`, with the loss's metrics in its `metrics`. Submit
        `optim_step` before waiting for it.

    Raises:
        ConfigError: see `compute_grpo_kl_loss`.
        DataError, ShapeError, NonFiniteError, EmptyMaskError: data that cannot be used; nothing was sent.
        UnsupportedVersion: the SDK is missing or outside the range.
    """
    load_tinker()
    client = client.result() if hasattr(client, "result_async") else client  # newer SDKs return a future
    call = LossCall(kl_coef, cliprange, kl or KLConfig(), **options)
    rows = call.read(data)

    def compute(_: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return _loss(rows, logprobs_list, call)

    bare = [with_inputs(datum, {"target_tokens": x}) for datum, x in zip(data, rows.asked(), strict=True)]
    return client.forward_backward_custom(bare, compute)


@torch.no_grad()
def _mismatch(rows: Rows, policy: Tensor) -> dict[str, float]:
    """KL of the sampler from the trainer in nats per token, by k1 and k3, and the largest log-ratio."""
    delta = masked_log_ratio(rows.logprobs, policy, rows.mask)
    kls = {f"sampler/{name}": float(masked_mean(ESTIMATORS[name].value(delta), rows.mask)) for name in ("k1", "k3")}
    return kls | {"sampler/log_ratio_max": float(delta.abs().max())}


def check(
    loss: Tensor,
    data: Sequence[Any],
    logprobs_list: Sequence[Tensor],
    *,
    beta: float | None = None,
    means: Literal["reverse", "forward"] = "reverse",
    **more: Any,
) -> Verdict:
    """Is the KL in this loss right? Call it in a loss of `forward_backward_custom`, before the return.

    Args:
        loss: the scalar that the function returns.
        data: their `logprobs` count as the old policy, `ref_logprobs` (else `teacher_logprobs`) as the reference.
        logprobs_list: as the SDK hands them to the loss.
        beta: the coefficient that the KL is meant to have.
        means: the divergence that is meant.
        more: further arguments of `klamp.check`: clip, kl_in, save, once, ...

    Raises:
        DataError, ShapeError, NonFiniteError, EmptyMaskError: as `compute_grpo_kl_loss`.
    """
    rows = read_rows(data)
    anchor = rows.teacher_logprobs if rows.ref_logprobs is None else rows.ref_logprobs
    names = {"mask": rows.mask, "old_logprobs": rows.logprobs, "advantages": rows.advantages, "ref_logprobs": anchor}
    lists: dict[str, Any] = {
        name: [row[:length] for row, length in zip(x, rows.lengths, strict=True)]
        for name, x in names.items()
        if x is not None
    }
    return check_loss(loss, policy_logprobs=list(logprobs_list), beta=beta, means=means, host="tinker", **lists, **more)
