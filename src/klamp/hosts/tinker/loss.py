"""klamp's loss for `forward_backward_custom`: the datums become one padded batch for `grpo_loss`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import Totals, masked_mean, natural_denominator, total_denominator
from klamp.core.objective import grpo_loss
from klamp.core.topk import head_mass, topk_kl_of
from klamp.core.types import LossPart
from klamp.errors import ConfigError, NonFiniteError
from klamp.hosts.common.versions import load_tinker
from klamp.hosts.tinker.datums import Rows, read_rows, with_inputs
from klamp.hosts.tinker.options import LossSettings, Normalizer, make_settings


def compute_grpo_kl_loss(
    data: Sequence[Any],
    logprobs_list: Sequence[Tensor],
    kl_coef: float | None = None,
    cliprange: float | tuple[float, float] | None = None,
    kl: KLConfig | None = None,
    *,
    loss: LossConfig | None = None,
    teacher: TeacherConfig | None = None,
    normalizer: Normalizer = "loss_type",
    max_length: int | None = None,
    group_size: int | None = None,
    totals: Totals | None = None,
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
    Thread: pure; reads only its arguments, so that the SDK may call it anywhere.

    Args:
        data: datums as `build_datum` makes them; anything with `loss_fn_inputs` of 1-D tensors will do.
        logprobs_list: log-probabilities of `target_tokens` under the policy, one tensor per datum, with gradient; with
            teacher_estimator="topk" those of the head before them, [N, K + 1], as `forward_backward_kl` asks for them.
        kl_coef: coefficient of the KL per nat of a token, for instance a controller's value; None: `kl.beta`. With 0
            no `ref_logprobs` are needed.
        cliprange: ratio bound, or (below 1, above 1), of PPO's loss as a mean over the tokens; None: 0.2.
        kl: every choice about the KL; None: klamp's default.
        loss: every choice about the policy loss, the bounds of the ratio included, instead of `cliprange`.
        teacher: the KL to a teacher: k1 or k3 of the datums' teacher_logprobs, or topk of their teacher_head.
        normalizer: token_sum: a plain sum over the tokens, as the built-in losses; else the average of `loss`.
        max_length: L of loss_type="dr_grpo", in tokens.
        group_size: datums per prompt, next to each other; a clip of the KL (`kl_clip_method`) needs it.
        totals: size of the whole step (`count_tokens`) when several calls share one `optim_step`.

    Returns:
        The loss, and metrics as floats, names as in docs/metrics.md: `train/loss`, `train/kl_penalty`, `kl/k3`, ...

    Raises:
        UnknownNameError: an unknown choice; names the nearest.
        ConfigError: a choice that cannot work here, or `cliprange` beside `loss`.
        DataError, ShapeError, NonFiniteError, EmptyMaskError: data that cannot be used; the datum is named.

    Source: the Tinker guide (docs/sources.md); PPO arXiv:1707.06347, DeepSeekMath arXiv:2402.03300
    """
    settings = make_settings(kl_coef, cliprange, kl, loss, teacher, normalizer, max_length, group_size, totals)
    return loss_of_rows(settings.read(data), logprobs_list, settings)


def loss_of_rows(
    rows: Rows, logprobs_list: Sequence[Tensor], settings: LossSettings
) -> tuple[Tensor, dict[str, float]]:
    """`compute_grpo_kl_loss` for datums that were read before."""
    objective, wide = settings.objective, rows.policy(logprobs_list)
    policy, taught, seen = wide[..., -1], None, dict[str, Tensor]()
    if settings.head is not None and rows.teacher_logprobs is not None:
        anchor = torch.cat([rows.head_logprobs, rows.teacher_logprobs[..., None]], -1)
        ids = torch.cat([rows.head, rows.targets[..., None]], -1)
        taught, seen = told_kl(wide, anchor, ids, settings.head, rows.logprobs)
    batch = rows.batch(
        policy,
        group_size=settings.group_size,
        reference_length=settings.kl.kl_reference_length,
        teacher_kl=taught,
    )
    output = grpo_loss(batch, objective, totals=settings.totals)
    _check_finite(output.loss, wide)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    metrics |= {f"teacher/{name}": float(masked_mean(mass, rows.mask)) for name, mass in seen.items()}
    metrics |= {"beta": objective.beta, "train/loss": float(output.loss.detach())}
    metrics["train/denominator"] = _denominator(rows, settings)
    if "train/kl_penalty" in metrics:
        metrics["train/kl_denominator"] = _denominator(rows, settings, part="kl")
    return output.loss, metrics | mismatch_metrics(rows, policy.detach())


def told_kl(
    policy: Tensor, anchor: Tensor, ids: Tensor, teacher: TeacherConfig, sampler: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to a teacher at each position of which a server told the head, in nats, with gradient in the policy.

    With it, without gradient, the mass of the head under either model. The head's tokens stand first in the last
    dimension, -1 where there is none, and the sampled token last: [..., K + 1] x 3, sampler [...] -> [...] each.

    Args:
        policy: log-probabilities under the policy.
        anchor: under the teacher.
        ids: the tokens.
        teacher: which KL.
        sampler: of the sampled tokens, under who drew them.
    """
    kept = ids[..., :-1] >= 0
    weight = None if teacher.teacher_off_policy == "none" else policy[..., -1].detach() - sampler
    direction, tail = teacher.teacher_direction, teacher.teacher_tail
    kl = topk_kl_of(policy, anchor, ids, direction=direction, tail=tail, log_weight=weight, kept=kept)
    masses = zip(("student_mass", "teacher_mass"), (policy, anchor), strict=True)
    return kl, {name: head_mass(x[..., :-1], kept) for name, x in masses} if teacher.teacher_top_k else {}


def _check_finite(loss: Tensor, policy: Tensor) -> None:
    """Refuse a loss or gradient that is not finite: sent to the service, it would spoil the weights."""
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
    """The counts of a step for `totals=`, where several calls share one `optim_step`: sequences, tokens, KL tokens.

    Raises:
        DataError, ShapeError, NonFiniteError, EmptyMaskError: as `compute_grpo_kl_loss`.
    """
    return read_rows(data).totals


def _denominator(rows: Rows, settings: LossSettings, *, part: LossPart = "policy") -> float:
    objective = settings.objective
    kl = part == "kl"
    reduction = (objective.kl.normalizer if kl else None) or objective.reduction
    if settings.totals is not None:
        return float(total_denominator(settings.totals, reduction, length=objective.max_length, part=part))
    counted = rows.mask & rows.kl_mask if kl and rows.kl_mask is not None else rows.mask
    return float(natural_denominator(counted, reduction, length=objective.max_length))


def forward_backward_kl(
    client: Any,
    data: Sequence[Any],
    kl_coef: float | None = None,
    cliprange: float | tuple[float, float] | None = None,
    kl: KLConfig | None = None,
    *,
    loss: LossConfig | None = None,
    teacher: TeacherConfig | None = None,
    normalizer: Normalizer = "loss_type",
    max_length: int | None = None,
    group_size: int | None = None,
    totals: Totals | None = None,
) -> Any:
    """Forward and backward pass of `compute_grpo_kl_loss` through a `TrainingClient`: the gradient adds up there.

    The data is checked before anything is sent: an error inside a loss would leave the client unusable. The service
    gets datums that hold `target_tokens` only, so that SDKs before 0.32 take them too; the loss reads the full ones.
    With teacher_estimator="topk" these are [N, K + 1]: at each position the teacher's head, and the target.
    Two passes over the data: a forward, then a forward and backward.

    Args:
        client: a `TrainingClient`, or the SDK's future of one; in async code one that was awaited.
        data: datums as `build_datum` makes them.
        kl_coef: this argument and the following ones are those of `compute_grpo_kl_loss`.
        cliprange: see there.
        kl: see there.
        loss: see there.
        teacher: see there.
        normalizer: see there.
        max_length: see there.
        group_size: see there.
        totals: see there.

    Returns:
        What the client returns: a future of `ForwardBackwardOutput`, with the loss's metrics in its `metrics`. Submit
        `optim_step` before waiting for it. With SDKs before 0.36 the call itself waits for the first pass.

    Raises:
        ConfigError: see `compute_grpo_kl_loss`; in async code a client that nobody has awaited.
        DataError, ShapeError, NonFiniteError, EmptyMaskError: data that cannot be used; nothing was sent.
        UnsupportedVersion: the SDK is missing or outside the range.

    What the service answers is checked inside the loss: NaN there raises NonFiniteError where the result is asked for,
    no gradient is sent, and SDKs from 0.36 on then take no more requests on this client. Save the state before.
    """
    load_tinker()
    client = _awaited(client)
    settings = make_settings(kl_coef, cliprange, kl, loss, teacher, normalizer, max_length, group_size, totals)
    rows = settings.read(data)

    def compute(_: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return loss_of_rows(rows, logprobs_list, settings)

    bare = [with_inputs(datum, {"target_tokens": x}) for datum, x in zip(data, rows.asked(), strict=True)]
    return client.forward_backward_custom(bare, compute)


def _awaited(client: Any) -> Any:
    """The client, where newer SDKs have handed out a future of it.

    Raises:
        ConfigError: it would have to be waited for, in async code.
    """
    if not hasattr(client, "result_async"):
        return client
    if _in_async_code() and not client.future().done():
        raise ConfigError(
            "the training client has to be awaited before it is used in async code",
            got=type(client).__name__,
            why="the SDK hands out a future of it; to wait for it here would block the event loop",
            fix="client = await service.create_lora_training_client(...), once, before the first step",
        )
    return client.result()


def _in_async_code() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def mismatch_metrics(rows: Rows, policy: Tensor) -> dict[str, float]:
    """KL of the sampler from the trainer in nats per token, as the two report themselves.

    Equation: with d = log sampler - log trainer: `sampler/k1` mean d, `sampler/k3` mean (exp(-d) - 1 + d),
    `sampler/log_ratio_max` max |d|, over the tokens that are trained on.
    """
    delta = masked_log_ratio(rows.logprobs, policy, rows.mask)
    found = {f"sampler/{name}": float(masked_mean(ESTIMATORS[name].value(delta), rows.mask)) for name in ("k1", "k3")}
    return found | {"sampler/log_ratio_max": float(delta.abs().max())}
