"""grpo_loss: surrogate + beta * KL penalty, each reduced once. The only place where the parts meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core import surrogates
from klamp.core.checks import check_batch
from klamp.core.clipping import ClipLevel, clip_gate, clip_kl, gate_kl, kl_budget
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import (
    clamped_share,
    exact_penalty,
    log_weights,
    masked_log_ratio,
    penalty_from_weights,
    truncated_share,
)
from klamp.core.masking import (
    Totals,
    masked,
    masked_mean,
    masked_sum,
    natural_denominator,
    reduce_tokens,
    total_denominator,
)
from klamp.core.placement import kl_in_advantage
from klamp.core.types import (
    Batch,
    ClipMethod,
    Gradient,
    Horizon,
    LossOutput,
    Mask,
    Reduction,
    TokenValues,
    Value,
)
from klamp.errors import ConfigError, unknown_name

Placement: TypeAlias = Literal["loss", "reward", "advantage"]
OffPolicy: TypeAlias = Literal["none", "token", "sequence"]
SurrogateName: TypeAlias = Literal["ppo_clip", "cispo", "score_function"]


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """Everything about the KL but its coefficient; built and validated by `KLConfig`."""

    value: Value = "k3"
    """Estimator of the value."""
    gradient: Gradient = "reverse"
    """Which divergence's gradient flows."""
    horizon: Horizon = "token"
    """Whether a token's effect on the KL of later tokens counts."""
    placement: Placement = "loss"
    """Where the KL enters; `reward` is applied before the advantages are formed, so grpo_loss adds nothing."""
    off_policy: OffPolicy = "none"
    """Weight by policy / sampler: not at all, per token, or by the ratio of the whole prefix."""
    max_weight: float | None = None
    """Truncation of that weight."""
    max_log_ratio: float | None = None
    """Straight-through bound of the log-ratio, in nats."""
    clip_method: ClipMethod = "none"
    """How the KL is clipped at its budget."""
    clip_threshold: float = 0.5
    """Nats per token, or in total."""
    clip_temperature: float = 1.0
    """Width of the soft clip, in nats."""
    clip_level: ClipLevel = "sequence"
    """Whose KL opens the gate."""
    clip_per_token: bool = True
    """Whether the threshold is per token (times the reference length)."""
    normalizer: Reduction | None = None
    """Reduction of the KL; None: that of the surrogate."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss: which surrogate, which KL, how much of it, and how tokens become one number."""

    surrogate: SurrogateName = "ppo_clip"
    """Policy loss."""
    clip_low: float = 0.2
    """Ratio bound below 1."""
    clip_high: float = 0.2
    """Ratio bound above 1."""
    reduction: Reduction = "sequence_mean"
    """How per-token values become one number."""
    max_length: int | None = None
    """L of the reduction `fixed_length`."""
    beta: float = 0.0
    """Coefficient of the KL; 0 takes it out of the loss altogether."""
    kl: KLTerm = KLTerm()
    """The KL itself."""


SURROGATES: dict[str, Callable[[Objective, Tensor, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda o, policy, old, a: surrogates.ppo_clip(
        policy, old, a, clip_low=o.clip_low, clip_high=o.clip_high
    ),
    "cispo": lambda o, policy, old, a: surrogates.cispo(policy, old, a, clip_low=o.clip_low, clip_high=o.clip_high),
    "score_function": lambda o, policy, old, a: surrogates.score_function(policy, old, a),
}


def grpo_loss(batch: Batch, objective: Objective, *, totals: Totals | None = None) -> LossOutput:
    """The loss of a batch: policy surrogate plus beta times the KL penalty.

    Equation: R[surrogate_t] + beta R_kl[penalty_t], R and R_kl the reductions. With placement `advantage` the KL
    shifts the advantages instead; with `reward` it is in the advantages already; with beta 0 there is no KL term.

    Sampler: the old policy (`old_logprobs`), or the policy itself.
    Gradient: that of the surrogate plus beta times that of the penalty (`kl_penalty`), gated where the KL is clipped.
    Shapes: see `Batch`; the loss is a scalar.

    Args:
        batch: scored completions.
        objective: the loss.
        totals: size of the whole batch when this is a micro-batch of it: then losses and gradients of the
            micro-batches add up exactly to those of the whole.

    Raises:
        ShapeError, EmptyMaskError, NonFiniteError: see `check_batch`.
        ConfigError: a KL is asked for and the reference's log-probabilities (or the exact KL) are missing.

    Source: DeepSeekMath arXiv:2402.03300
    """
    check_batch(batch, part=totals is not None)
    kl_mask = batch.mask if batch.kl_mask is None else batch.mask & batch.kl_mask
    policy = masked(batch.policy_logprobs, batch.mask)
    old = policy.detach() if batch.old_logprobs is None else masked(batch.old_logprobs, batch.mask)
    metrics: dict[str, Tensor] = {}
    gate = _Gate.of(batch, objective, kl_mask) if objective.beta > 0 else None
    advantages = _advantages(batch, objective, kl_mask, old, gate)
    if objective.surrogate not in SURROGATES:
        raise unknown_name("surrogate", objective.surrogate, SURROGATES)
    tokens = SURROGATES[objective.surrogate](objective, policy, old, advantages)
    loss = _reduce(tokens, batch.mask, batch.mask, objective.reduction, objective, totals)
    metrics["loss/policy"] = loss.detach()
    if objective.beta > 0 and objective.kl.placement == "loss":
        penalty = _penalty(batch, objective.kl, kl_mask, gate)
        reduction = objective.kl.normalizer or objective.reduction
        kl_loss = objective.beta * _reduce(penalty, batch.mask, kl_mask, reduction, objective, totals, kl=True)
        metrics["loss/kl"] = kl_loss.detach()
        loss = loss + kl_loss
    metrics |= _seen(batch, objective, kl_mask, policy.detach(), old, advantages)
    if gate is not None:
        metrics |= gate.metrics()
    return LossOutput(loss, metrics)


def _reduce(
    x: TokenValues,
    mask: Mask,
    counted: Mask,
    reduction: Reduction,
    objective: Objective,
    totals: Totals | None,
    *,
    kl: bool = False,
) -> Float[Tensor, ""]:
    length = objective.max_length
    if totals is None:
        denominator = natural_denominator(counted, reduction, length=length)
    else:
        denominator = total_denominator(totals, reduction, length=length, kl=kl)
    return reduce_tokens(x, mask, reduction, denominator=denominator, counted=counted)


def _require_reference(batch: Batch) -> Tensor:
    if batch.ref_logprobs is None:
        raise ConfigError(
            "beta is positive and the batch has no reference log-probabilities",
            got="ref_logprobs=None",
            why="a KL needs a reference; leaving it out silently would train without one",
            fix="score the batch with the reference, or set beta=0",
        )
    return batch.ref_logprobs


@dataclass(frozen=True)
class _Gate:
    """The clip of a batch: KL and budget in nats per sequence, and the factor on the gradient. All [B]."""

    kl: Tensor
    budget: Tensor
    factor: Tensor
    clipped: Tensor

    @classmethod
    def of(cls, batch: Batch, objective: Objective, kl_mask: Mask) -> _Gate | None:
        term = objective.kl
        if term.clip_method == "none":
            return None
        kl = batch.gate_kl if batch.gate_kl is not None else sequence_gate_kl(batch, term, kl_mask)
        length = batch.reference_length
        budget = kl_budget(term.clip_threshold, per_token=term.clip_per_token, reference_length=length)
        limit = torch.as_tensor(budget, dtype=kl.dtype, device=kl.device).expand_as(kl)
        factor = clip_gate(kl, limit, method=term.clip_method, temperature=term.clip_temperature)
        clipped = clip_kl(kl, limit, method=term.clip_method, temperature=term.clip_temperature)
        return cls(kl, limit, factor, clipped)

    def apply(self, penalty: TokenValues, kl_mask: Mask) -> TokenValues:
        """Penalty with the clip: value lowered by what the budget takes, spread over the tokens; gradient gated."""
        shift = (self.clipped - self.kl) / kl_mask.sum(-1).clamp(min=1)
        factor = self.factor.unsqueeze(-1)
        open_here = (factor > 0) & kl_mask
        value = torch.where(open_here, penalty.detach() + shift.unsqueeze(-1), torch.zeros_like(penalty))
        return value + factor * (penalty - penalty.detach())

    def metrics(self) -> dict[str, Tensor]:
        return {
            "kl/budget": self.budget.mean(),
            "kl/before_clip": self.kl.mean(),
            "kl/after_clip": self.clipped.mean(),
            "kl/over_budget": (self.kl > self.budget).float().mean(),
        }


def sequence_gate_kl(batch: Batch, term: KLTerm, kl_mask: Mask) -> Float[Tensor, " batch"]:
    """The low-noise KL (nats per sequence) that gates the clip, from a batch that holds whole groups.

    The exact KL where it is at hand, at the level asked for; otherwise k3, averaged at least over the group.
    """
    if batch.exact_kl is not None:
        return gate_kl(
            masked_sum(batch.exact_kl.detach(), kl_mask, -1), level=term.clip_level, group_size=batch.group_size
        )
    delta = masked_log_ratio(
        batch.policy_logprobs, _require_reference(batch), kl_mask, max_log_ratio=term.max_log_ratio
    )
    k3 = masked_sum(ESTIMATORS["k3"].value(delta), kl_mask, -1)
    level: ClipLevel = "group" if term.clip_level == "sequence" else term.clip_level
    return gate_kl(k3, level=level, group_size=batch.group_size)


def _log_weights(batch: Batch, term: KLTerm, kl_mask: Mask, *, exact: bool) -> Tensor:
    """Off-policy log-weights of the penalty. The prefix ratio runs over every trained token, excluded or not."""
    if term.off_policy == "none" or (exact and term.off_policy == "token"):
        return torch.zeros_like(masked(batch.policy_logprobs.detach(), batch.mask))
    if batch.sampler_logprobs is None:
        raise ConfigError(
            "kl_off_policy needs the sampler's log-probabilities",
            got="sampler_logprobs=None",
            why="the weight is policy / sampler",
            fix="pass what the sampler reported for its tokens, or kl_off_policy='none'",
        )
    return log_weights(
        batch.policy_logprobs,
        batch.sampler_logprobs,
        batch.mask,
        prefix=term.off_policy == "sequence",
        max_weight=term.max_weight,
    )


def _penalty(batch: Batch, term: KLTerm, kl_mask: Mask, gate: _Gate | None) -> TokenValues:
    """Per-token penalty of the loss, clipped where a gate is given. [B, T]"""
    log_w = _log_weights(batch, term, kl_mask, exact=term.value == "exact")
    if term.value == "exact":
        if batch.exact_kl is None:
            raise ConfigError(
                "kl_estimator='exact' needs the exact KL of the batch",
                got="exact_kl=None",
                why="it is summed over the vocabulary, from both models' logits",
                fix="set Batch.exact_kl = exact_kl(policy_logits, ref_logits)",
            )
        penalty = exact_penalty(
            batch.policy_logprobs,
            batch.exact_kl,
            log_w,
            batch.mask,
            gradient=term.gradient,
            horizon=term.horizon,
            surrogate=batch.exact_kl_forward,
            kl_mask=None if batch.kl_mask is None else kl_mask,
        )
    else:
        delta = masked_log_ratio(
            batch.policy_logprobs, _require_reference(batch), kl_mask, max_log_ratio=term.max_log_ratio
        )
        penalty = penalty_from_weights(
            batch.policy_logprobs,
            delta,
            log_w,
            batch.mask,
            value=term.value,
            gradient=term.gradient,
            horizon=term.horizon,
            kl_mask=None if batch.kl_mask is None else kl_mask,
        )
    return penalty if gate is None else gate.apply(penalty, kl_mask)


def _advantages(
    batch: Batch, objective: Objective, kl_mask: Mask, old: TokenValues, gate: _Gate | None
) -> Float[Tensor, ...]:
    """The advantages of the surrogate, with the KL in them where it is placed there."""
    if objective.beta <= 0 or objective.kl.placement != "advantage":
        return batch.advantages
    beta = objective.beta if gate is None else objective.beta * gate.factor.unsqueeze(-1)
    return kl_in_advantage(
        batch.advantages,
        old,
        _require_reference(batch),
        kl_mask,
        beta=beta,
        horizon=objective.kl.horizon,
        max_log_ratio=objective.kl.max_log_ratio,
    )


def _seen(
    batch: Batch, objective: Objective, kl_mask: Mask, policy: Tensor, old: Tensor, advantages: Tensor
) -> dict[str, Tensor]:
    """What is worth seeing of a batch, detached."""
    metrics = {"beta": torch.as_tensor(objective.beta, dtype=policy.dtype)}
    if objective.surrogate == "ppo_clip":
        clipped = surrogates.ratio_clipped(
            policy, old, advantages, clip_low=objective.clip_low, clip_high=objective.clip_high
        )
        metrics["policy/ratio_clipped"] = masked_mean(clipped.float(), batch.mask)
    if batch.ref_logprobs is not None:
        metrics |= _kl_metrics(batch, objective.kl, kl_mask)
    if batch.exact_kl is not None:
        metrics["kl/exact"] = masked_mean(batch.exact_kl.detach(), kl_mask)
    if batch.sampler_logprobs is not None and objective.kl.max_weight is not None:
        metrics["kl/weights_truncated"] = truncated_share(
            batch.policy_logprobs,
            batch.sampler_logprobs,
            batch.mask,
            prefix=objective.kl.off_policy == "sequence",
            max_weight=objective.kl.max_weight,
        )
    return metrics


def _kl_metrics(batch: Batch, term: KLTerm, kl_mask: Mask) -> dict[str, Tensor]:
    delta = masked_log_ratio(batch.policy_logprobs, _require_reference(batch), kl_mask)
    metrics = {f"kl/{name}": masked_mean(ESTIMATORS[name].value(delta), kl_mask) for name in ("k1", "k3")}
    metrics["kl/k3_sequence"] = masked_sum(ESTIMATORS["k3"].value(delta), kl_mask, -1).mean()
    metrics["kl/log_ratio_max"] = delta.abs().amax()
    if term.max_log_ratio is not None:
        metrics["kl/log_ratio_clamped"] = clamped_share(
            batch.policy_logprobs, _require_reference(batch), kl_mask, max_log_ratio=term.max_log_ratio
        )
    return metrics
