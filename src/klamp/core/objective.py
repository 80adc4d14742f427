"""The loss of GRPO with a KL: the policy loss plus beta times the KL penalty; the only place where they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core import surrogates
from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, check_fields, check_instance, check_roles
from klamp.core.masking import (
    Totals,
    check_batch,
    check_totals,
    masked,
    masked_mean,
    reduce_tokens,
    total_denominator,
)
from klamp.core.penalty import kl_metrics, shifted_advantages, token_penalty
from klamp.core.term import Distances, Gate, KLTerm, carries_kl
from klamp.core.types import (
    Advantages,
    Batch,
    LossOutput,
    LossPart,
    Mask,
    Reduction,
    TokenValues,
)
from klamp.errors import check_name

SurrogateName: TypeAlias = Literal["ppo_clip", "cispo", "score_function"]


OBJECTIVE_NUMBERS = {
    "clip_low": surrogates.CLIP_LOW,
    "clip_high": surrogates.CLIP_HIGH,
    "max_length": AT_LEAST_1,
    "beta": AT_LEAST_0.but("a negative coefficient rewards leaving the reference", "use beta=0 for no KL"),
}
"""Which numbers the fields of `Objective` take."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which loss `grpo_loss` computes: the surrogate, the KL with its beta (reward per nat), the average over tokens.

    Equation: R[surrogate_t] + beta R_kl[penalty_t], see `grpo_loss`. `build_objective` makes one from a `KLConfig` and
    a `LossConfig`; `dataclasses.replace(objective, beta=controller.value)` sets the beta of a step.
    """

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
    kl: KLTerm = field(default_factory=KLTerm)
    """The KL itself."""

    def __post_init__(self) -> None:
        check_fields(self, OBJECTIVE_NUMBERS)


SURROGATES: dict[SurrogateName, Callable[[Objective, Tensor, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda o, policy, old, a: surrogates.ppo_clip(
        policy, old, a, clip_low=o.clip_low, clip_high=o.clip_high
    ),
    "cispo": lambda o, policy, old, a: surrogates.cispo(policy, old, a, clip_low=o.clip_low, clip_high=o.clip_high),
    "score_function": lambda o, policy, old, a: surrogates.score_function(policy, old, a),
}


def grpo_loss(batch: Batch, objective: Objective, *, totals: Totals | None = None) -> LossOutput:
    """The loss of a batch: the policy loss plus beta times the KL penalty.

    Equation: R[surrogate_t] + beta R_kl[penalty_t], R and R_kl the reductions. With placement `advantage` the KL
    shifts the advantages instead; with `reward` it is in the advantages already; with beta 0 there is no KL term.

    Sampler: the old policy (`old_logprobs`), or the policy itself.
    Gradient: that of the surrogate plus beta times that of the penalty (`kl_penalty`), gated where the KL is clipped.
    Once differentiable where there is a penalty.
    Shapes: see `Batch`; the loss is a scalar.

    Args:
        batch: scored completions.
        objective: the loss.
        totals: size of the whole batch when this is a micro-batch of it: then losses and gradients of the
            micro-batches add up exactly to those of the whole.

    Raises:
        TensorError, ShapeError, EmptyMaskError, NonFiniteError, DataError: see `check_batch`.
        ConfigError: a KL is asked for and the reference's log-probabilities (or the exact KL) are missing, or the
            reference carries the gradient and the policy none.

    Source: DeepSeekMath arXiv:2402.03300
    """
    check_instance("batch", batch, Batch)
    check_instance("objective", objective, Objective, fix="use build_objective(KLConfig(...), LossConfig(...))")
    if totals is not None:
        check_totals(totals)
    check_batch(batch, part=totals is not None)
    if batch.ref_logprobs is not None:
        check_roles(batch.policy_logprobs, batch.ref_logprobs)
    kl_mask = batch.mask if batch.kl_mask is None else batch.mask & batch.kl_mask
    policy = masked(batch.policy_logprobs, batch.mask)
    old = policy.detach() if batch.old_logprobs is None else masked(batch.old_logprobs, batch.mask)
    metrics: dict[str, Tensor] = {}
    known = None if batch.ref_logprobs is None else Distances.of(batch, objective.kl)
    gate = Gate.of(batch, objective.kl, known) if objective.beta > 0 else None
    advantages: Advantages = batch.advantages
    if objective.beta > 0 and objective.kl.placement == "advantage":
        advantages = shifted_advantages(batch, objective.kl, beta=objective.beta, gate=gate)
    check_name("surrogate", objective.surrogate, SURROGATES)
    tokens = SURROGATES[objective.surrogate](objective, policy, old, advantages)
    loss = _reduce(tokens, batch.mask, batch.mask, objective.reduction, objective, totals)
    metrics["train/policy_loss"] = loss.detach()
    if objective.beta > 0 and objective.kl.placement == "loss":
        penalty = token_penalty(batch, objective.kl, gate, known=known)
        reduction = objective.kl.normalizer or objective.reduction
        kl_loss = objective.beta * _reduce(penalty, batch.mask, kl_mask, reduction, objective, totals, part="kl")
        metrics["train/kl_penalty"] = kl_loss.detach()
        loss = loss + kl_loss
    metrics["beta"] = torch.as_tensor(objective.beta, dtype=policy.dtype)
    if objective.surrogate == "ppo_clip":
        clipped = surrogates.ratio_clipped(
            policy.detach(), old, advantages, clip_low=objective.clip_low, clip_high=objective.clip_high
        )
        metrics["policy/ratio_clipped"] = masked_mean(clipped.float(), batch.mask)
    metrics |= kl_metrics(batch, objective.kl, known)
    if gate is not None:
        metrics |= gate.metrics()
    return LossOutput(loss, metrics)


def without_gradient(batch: Batch, objective: Objective) -> Bool[Tensor, " batch"]:
    """Sequences that the gradient of `grpo_loss` is exactly 0 in, whatever the policy says of them. [B]

    That is: no token is trained, or every advantage is 0 and the KL does not pull: beta is 0, it is in the reward (and
    so in the advantages), it has no gradient, its weight is 0, no token carries it, or its clip is closed.

    A pass that only serves the gradient can leave them out; values and metrics still need them. Where the KL is
    clipped and `gate_kl` is None, the gate is computed from the batch's own log-probabilities, as `grpo_loss` does.

    Shapes: see `Batch` -> [B].

    Raises:
        ConfigError: as `Gate.of`.
    """
    advantages = batch.advantages if batch.advantages.ndim == 2 else batch.advantages.unsqueeze(-1)
    pushed = ((advantages != 0) & batch.mask).any(-1)
    return ~(pushed | _pulled(batch, objective))


def _pulled(batch: Batch, objective: Objective) -> Bool[Tensor, " batch"]:
    """Which sequences the KL has a gradient in. [B]"""
    term = objective.kl
    silent = objective.beta <= 0 or term.placement == "reward"
    if silent or (term.placement == "loss" and term.gradient == "none"):
        return torch.zeros_like(batch.mask[:, 0])
    gate = Gate.of(batch, term)
    carried = carries_kl(batch).any(-1)
    return carried if gate is None else carried & (gate.factor > 0)


def _reduce(
    x: TokenValues,
    mask: Mask,
    counted: Mask,
    reduction: Reduction,
    objective: Objective,
    totals: Totals | None,
    *,
    part: LossPart = "policy",
) -> Float[Tensor, ""]:
    length = objective.max_length
    whole = None if totals is None else total_denominator(totals, reduction, length=length, part=part)
    return reduce_tokens(x, mask, reduction, length=length, denominator=whole, counted=counted)
