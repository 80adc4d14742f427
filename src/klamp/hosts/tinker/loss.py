"""klamp's loss for `forward_backward_custom`, where datums become one padded batch, and the check of any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from klamp.audit.micro_batch import check as check_loss
from klamp.audit.verdict import Verdict
from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import Totals, masked_mean, total_denominator
from klamp.core.objective import grpo_loss
from klamp.core.topk import head_mass, topk_kl_of
from klamp.core.types import LossPart
from klamp.doctor.metrics import check_metrics
from klamp.errors import NonFiniteError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.datums import Rows, read_rows, with_inputs
from klamp.hosts.tinker.options import LossSettings, Options, make_settings


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
    the KL of the sampler from the trainer (`sampler/k1`, `sampler/k3`): before the first update about 0.002 nats per
    token is healthy, above 0.01 an alarm.

    Sampler: whoever `logprobs` belong to; it is the old policy of the ratio and the sampler of `kl_off_policy`.
    Gradient: that of `grpo_loss`. Every datum gets one, zeros where nothing of it is trained on.

    Args:
        data: datums as `build_datum` makes them; anything with `loss_fn_inputs` of 1-D tensors will do.
        logprobs_list: log-probabilities of `target_tokens` under the policy, one tensor per datum, with gradient; with
            teacher_estimator="topk" those of the head before them, [N, K + 1], as `forward_backward_kl` asks for them.
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
    settings = make_settings(kl_coef, cliprange, kl, **options)
    return _loss(settings.read(data), logprobs_list, settings)


def _loss(rows: Rows, logprobs_list: Sequence[Tensor], settings: LossSettings) -> tuple[Tensor, dict[str, float]]:
    objective, wide = settings.objective, rows.policy(logprobs_list)
    policy, teacher_kl, masses = wide[..., -1], None, dict[str, Tensor]()
    if settings.head is not None:
        teacher_kl, masses = _head_kl(rows, wide, settings.head)
    batch = rows.batch(
        policy,
        group_size=settings.group_size,
        reference_length=settings.kl.kl_reference_length,
        teacher_kl=teacher_kl,
    )
    output = grpo_loss(batch, objective, totals=settings.totals)
    _check_finite(output.loss, wide)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    metrics |= {f"teacher/{name}": float(masked_mean(mass, rows.mask)) for name, mass in masses.items()}
    metrics |= {"beta": objective.beta, "train/loss": float(output.loss.detach())}
    metrics["train/denominator"] = _denominator(rows, settings)
    if "train/kl_penalty" in metrics:
        metrics["train/kl_denominator"] = _denominator(rows, settings, part="kl")
    check_metrics(metrics)
    return output.loss, metrics | _mismatch(rows, policy.detach())


def _head_kl(rows: Rows, policy: Tensor, teacher: TeacherConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to a teacher over the head of the datums, [B, N], and without gradient the head's mass in both models."""
    assert rows.teacher_logprobs is not None
    anchor = torch.cat([rows.head_logprobs, rows.teacher_logprobs[..., None]], -1)
    ids, kept = torch.cat([rows.head, rows.target_tokens[..., None]], -1), rows.head >= 0
    weight = None if teacher.teacher_off_policy == "none" else policy[..., -1].detach() - rows.logprobs
    how: Any = {"direction": teacher.teacher_direction, "tail": teacher.teacher_tail}
    kl = topk_kl_of(policy, anchor, ids, **how, log_weight=weight, kept=kept)
    if not teacher.teacher_top_k:
        return kl, {}
    return kl, {"student_mass": head_mass(policy[..., :-1], kept), "teacher_mass": head_mass(anchor[..., :-1], kept)}


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


def _denominator(rows: Rows, settings: LossSettings, *, part: LossPart = "policy") -> float:
    objective, totals = settings.objective, settings.totals or rows.totals
    reduction = (objective.kl.normalizer if part == "kl" else None) or objective.reduction
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

    The data is checked before anything is sent: an error inside a loss would leave the client unusable. The service
    gets datums that hold `target_tokens` only, so that SDKs before 0.32 take them too; with teacher_estimator="topk"
    these are [N, K + 1], at each position the teacher's head and the target. What the service answers is checked inside
    the loss: NaN there raises NonFiniteError where the result is asked for, no gradient is sent, and SDKs from 0.36 on
    then take no more requests on this client. Two passes over the data: a forward, then a forward and backward.

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
    client = client.result() if hasattr(client, "result_async") else client  # newer SDKs hand out a future of it
    settings = make_settings(kl_coef, cliprange, kl, **options)
    rows = settings.read(data)

    def compute(_: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return _loss(rows, logprobs_list, settings)

    bare = [with_inputs(datum, {"target_tokens": x}) for datum, x in zip(data, rows.asked(), strict=True)]
    return client.forward_backward_custom(bare, compute)


@torch.no_grad()
def _mismatch(rows: Rows, policy: Tensor) -> dict[str, float]:
    """KL of the sampler from the trainer in nats per token, by k1 and k3, and the largest log-ratio."""
    delta = masked_log_ratio(rows.logprobs, policy, rows.mask)
    found = {f"sampler/{name}": float(masked_mean(ESTIMATORS[name].value(delta), rows.mask)) for name in ("k1", "k3")}
    return found | {"sampler/log_ratio_max": float(delta.abs().max())}


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
    given = {"mask": rows.mask, "old_logprobs": rows.logprobs, "advantages": rows.advantages, "ref_logprobs": anchor}
    lists: dict[str, Any] = {
        name: [row[:length] for row, length in zip(x, rows.lengths, strict=True)]
        for name, x in given.items()
        if x is not None
    }
    return check_loss(loss, policy_logprobs=list(logprobs_list), beta=beta, means=means, host="tinker", **lists, **more)
