"""The loss of GRPO with a KL: the policy loss plus beta times the KL penalty; the only place where they meet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from klamp.core import surrogates
from klamp.core.arguments import AT_LEAST_1, COEFFICIENT, check_fields, check_instance, check_number, limited
from klamp.core.masking import Totals, check_totals, masked, masked_mean, reduce_tokens
from klamp.core.penalty import all_shifted, kl_metrics, mean_penalty, mix_metrics, penalty_name
from klamp.core.surrogates import Trusted, TrustRegion
from klamp.core.term import KLTerm, Weighted, prepare, prepare_terms
from klamp.core.types import HELD, Batch, LossOutput, Reduction, check_batch

SurrogateName: TypeAlias = Literal["ppo_clip", "cispo", "score_function"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which loss `grpo_loss` computes: the surrogate, its KL terms with their coefficients, the average over tokens.

    Equation: R[surrogate_t] + beta R_kl[penalty_t] + ..., see `grpo_loss`. `build_objective` makes one from a
    `KLConfig` and a `LossConfig`; `objective.weighted(controller.value)` sets the beta of a step.
    """

    surrogate: SurrogateName = "ppo_clip"
    """Policy loss."""
    clip_low: float = limited(0.2, surrogates.CLIP_LOW)
    """Ratio bound below 1."""
    clip_high: float = limited(0.2, surrogates.CLIP_HIGH)
    """Ratio bound above 1."""
    reduction: Reduction = "sequence_mean"
    """How per-token values become one number."""
    max_length: int | None = limited(None, AT_LEAST_1)
    """L of the reduction `fixed_length`."""
    terms: tuple[Weighted, ...] = ()
    """KL terms, each with its coefficient; 0 takes one out of the loss, below 0 it needs `KLTerm.beyond`."""
    trust: TrustRegion = field(default_factory=TrustRegion)
    """What bounds the policy loss's weight old policy / sampler; by default nothing."""

    def __post_init__(self) -> None:
        check_fields(self)
        for coefficient, term in self.terms:
            check_number("coefficient of a KL", coefficient, fix=COEFFICIENT.fix)
            check_instance("term", term, KLTerm)
        for coefficient, term in self.terms:
            total = coefficient + sum(other for other, toward in self.terms if toward.anchor == term.beyond)
            if total <= 0 or not term.follows_reverse:
                check_number("coefficient of a KL", coefficient, COEFFICIENT)

    @property
    def active(self) -> tuple[Weighted, ...]:
        """The KL terms whose coefficient is not 0."""
        return tuple(weighted for weighted in self.terms if weighted.coefficient != 0)

    @property
    def beta(self) -> float:
        """The coefficient of the run's own KL, the first to the reference or the sampler; 0 without one."""
        return next((coefficient for coefficient, term in self.terms if term.anchor in HELD), 0.0)

    def weighted(self, beta: float, **coefficients: float) -> Objective:
        """The objective with another `beta`, and by name with other coefficients of further anchors."""
        coefficients |= dict.fromkeys([term.anchor for _, term in self.terms if term.anchor in HELD][:1], beta)
        terms = (Weighted(coefficients.get(term.anchor, old), term) for old, term in self.terms)
        return replace(self, terms=tuple(terms))


SURROGATES: dict[SurrogateName, Callable[..., Tensor]] = {
    "ppo_clip": surrogates.ppo_clip,
    "cispo": surrogates.cispo,
    "score_function": surrogates.score_function,
}


def grpo_loss(batch: Batch, objective: Objective, *, totals: Totals | None = None) -> LossOutput:
    """The loss of a batch: the policy loss plus each KL penalty times its coefficient.

    Equation: R[v_t surrogate_t] + sum_k beta_k R_k[penalty_kt], R and R_k the reductions, v the weight of the trust
    region to the sampler (1 without one; the KL terms have weights of their own). With placement `advantage` a KL
    shifts the advantages instead, and the trust region drops no KL; with `reward` it is in the advantages already;
    with coefficient 0 no KL.

    Sampler: the old policy (`old_logprobs`), or the policy itself.
    Gradient: the surrogate's plus beta_k times each penalty's (`kl_penalty`), gated where a KL is clipped. Once
    differentiable with a penalty.
    Shapes: see `Batch`; the loss is a scalar.

    Args:
        batch, objective: scored completions, and the loss.
        totals: size of the whole batch, of which this is a micro-batch: their losses and gradients add up exactly.

    Raises:
        TensorError, ShapeError, EmptyMaskError, NonFiniteError, DataError: see `check_batch`.
        ConfigError: a KL is asked for and the log-probabilities of its anchor (or the exact KL) are missing, or the
            reference has a gradient and the policy has none.

    Source: DeepSeekMath arXiv:2402.03300
    """
    check_instance("batch", batch, Batch)
    check_instance("objective", objective, Objective, fix="use build_objective(KLConfig(...), LossConfig(...))")
    if totals is not None:
        check_totals(totals)
    bounded = {term.anchor for _, term in objective.terms if term.max_log_ratio is not None}
    check_batch(batch, part=totals is not None, bounded=bounded)
    policy, mask = masked(batch.policy_logprobs, batch.mask), batch.mask
    old = policy.detach() if batch.old_logprobs is None else masked(batch.old_logprobs, mask)
    terms = prepare_terms(batch, objective.terms)
    advantages = all_shifted(batch.advantages, terms)
    bounds = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    bounds = {} if objective.surrogate == "score_function" else bounds
    surrogate = functools.partial(SURROGATES[objective.surrogate], policy, old, **bounds)
    tokens = surrogate(advantages)
    metrics = {"beta": torch.as_tensor(objective.beta, dtype=policy.dtype)}
    if objective.surrogate == "ppo_clip":
        clipped = surrogates.ratio_clipped(policy.detach(), old, advantages, **bounds)
        metrics["policy/ratio_clipped"] = masked_mean(clipped.float(), mask)
    if objective.trust.is_set:
        trusted = Trusted.of(batch, objective.trust)
        of_kl: Tensor | float = 0.0
        if advantages is not batch.advantages:
            of_reward = surrogate(batch.advantages)
            tokens, of_kl = of_reward, trusted.kl_weights * (tokens - of_reward)
        tokens, metrics = trusted.weights * tokens + of_kl, metrics | trusted.metrics
    size: dict[str, Any] = {"length": objective.max_length, "totals": totals}
    loss = reduce_tokens(tokens, mask, objective.reduction, **size)
    metrics["train/policy_loss"] = loss.detach()
    for coefficient, prepared in terms:
        if coefficient != 0 and prepared.term.placement == "loss":
            kl_loss = coefficient * mean_penalty(prepared, objective.reduction, **size)
            metrics[penalty_name(prepared)] = kl_loss.detach()
            loss = loss + kl_loss
        metrics |= kl_metrics(prepared)
    metrics |= mix_metrics(terms)
    return LossOutput(loss, metrics)


def without_gradient(batch: Batch, objective: Objective) -> Bool[Tensor, " batch"]:
    """Sequences that contribute no gradient to `grpo_loss`; values and metrics still need them. [B]

    No token is trained, or every advantage is 0 and no KL pulls: its coefficient is 0, it is in the reward (and so in
    the advantages), it has no gradient, no token has it, or its clip is closed (by the anchor's `gate`, or by one
    computed from this batch).
    """
    advantages = batch.advantages if batch.advantages.ndim == 2 else batch.advantages.unsqueeze(-1)
    moved = ((advantages != 0) & batch.mask).any(-1)
    for _, term in objective.active:
        moved = moved | _pulled(batch, term)
    return ~moved


def _pulled(batch: Batch, term: KLTerm) -> Bool[Tensor, " batch"]:
    if term.placement == "reward" or (term.placement == "loss" and term.gradient == "none"):
        return torch.zeros_like(batch.mask[:, 0])
    prepared = prepare(batch, term)
    carried = prepared.carried.any(-1)
    return carried if prepared.gate is None else carried & (prepared.gate.factor > 0)
