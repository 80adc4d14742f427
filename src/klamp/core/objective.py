"""The loss of GRPO with a KL: the policy loss plus beta times the KL penalty; the only place where they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core import surrogates
from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, check_fields, check_instance, check_number, check_roles
from klamp.core.masking import Totals, check_batch, check_totals, masked, masked_mean, reduce_tokens, total_denominator
from klamp.core.penalty import kl_metrics, shifted_advantages, token_penalty
from klamp.core.surrogates import Trusted, TrustRegion
from klamp.core.term import Distances, Gate, KLTerm, carries_kl
from klamp.core.types import Advantages, Anchor, Batch, LossOutput, LossPart, Mask, Reduction, TokenValues

SurrogateName: TypeAlias = Literal["ppo_clip", "cispo", "score_function"]


OBJECTIVE_NUMBERS = {
    "clip_low": surrogates.CLIP_LOW,
    "clip_high": surrogates.CLIP_HIGH,
    "max_length": AT_LEAST_1,
    "beta": AT_LEAST_0.but("a negative coefficient rewards leaving the reference", "use beta=0 for no KL"),
}
"""Which numbers the fields of `Objective` take."""


class Weighted(NamedTuple):
    """A KL with its coefficient, in reward per nat."""

    coefficient: float
    term: KLTerm


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which loss `grpo_loss` computes: the surrogate, its KL terms with their coefficients, the average over tokens.

    Equation: R[surrogate_t] + beta R_kl[penalty_t] + ..., see `grpo_loss`. `build_objective` makes one from a
    `KLConfig` and a `LossConfig`; `dataclasses.replace(objective, beta=controller.value)` sets the beta of a step.
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
    trust: TrustRegion = field(default_factory=TrustRegion)
    """What bounds the policy loss's weight old policy / sampler; by default nothing."""
    others: tuple[Weighted, ...] = ()
    """KL terms to further anchors, each with its coefficient; 0 takes one out."""

    def __post_init__(self) -> None:
        check_fields(self, OBJECTIVE_NUMBERS)
        for coefficient, term in self.others:
            check_number("coefficient of a KL", coefficient, OBJECTIVE_NUMBERS["beta"])
            check_instance("term", term, KLTerm)

    @property
    def terms(self) -> tuple[Weighted, ...]:
        """The KL terms that are in force: those whose coefficient is above 0."""
        return tuple(each for each in (Weighted(self.beta, self.kl), *self.others) if each.coefficient > 0)


SURROGATES: dict[SurrogateName, Callable[..., Tensor]] = {
    "ppo_clip": surrogates.ppo_clip,
    "cispo": surrogates.cispo,
    "score_function": surrogates.score_function,
}


def grpo_loss(batch: Batch, objective: Objective, *, totals: Totals | None = None) -> LossOutput:
    """The loss of a batch: the policy loss plus each KL penalty times its coefficient.

    Equation: R[v_t surrogate_t] + sum_k beta_k R_k[penalty_kt], R and R_k the reductions, v the weight of the trust
    region to the sampler (1 without one; the KL terms have weights of their own). With placement `advantage` a KL
    shifts the advantages instead; with `reward` it is in the advantages already; with coefficient 0 there is none.

    Sampler: the old policy (`old_logprobs`), or the policy itself.
    Gradient: that of the surrogate plus beta_k times that of each penalty (`kl_penalty`), gated where a KL is clipped.
    Once differentiable where there is a penalty.
    Shapes: see `Batch`; the loss is a scalar.

    Args:
        batch, objective: scored completions, and the loss.
        totals: size of the whole batch, of which this is a micro-batch: their losses and gradients add up exactly.

    Raises:
        TensorError, ShapeError, EmptyMaskError, NonFiniteError, DataError: see `check_batch`.
        ConfigError: a KL is asked for and the log-probabilities of its anchor (or the exact KL) are missing, or the
            reference carries the gradient and the policy none.

    Source: DeepSeekMath arXiv:2402.03300
    """
    check_instance("batch", batch, Batch)
    check_instance("objective", objective, Objective, fix="use build_objective(KLConfig(...), LossConfig(...))")
    if totals is not None:
        check_totals(totals)
    may_forbid = any(term.anchor == "teacher" and term.max_log_ratio is not None for _, term in objective.others)
    check_batch(batch, part=totals is not None, bounded=may_forbid)
    for anchor in (batch.ref_logprobs, batch.teacher_logprobs):
        if anchor is not None:
            check_roles(batch.policy_logprobs, anchor)
    policy = masked(batch.policy_logprobs, batch.mask)
    old = policy.detach() if batch.old_logprobs is None else masked(batch.old_logprobs, batch.mask)
    metrics: dict[str, Tensor] = {}
    # what is in the reward was priced before, and needs no anchor here
    needed = [
        x for x in objective.terms if x.term.placement != "reward" or batch.anchor_logprobs(x.term.anchor) is not None
    ]
    parts = [_Part.of(batch, each) for each in needed]
    advantages: Advantages = batch.advantages
    for part in parts:
        if part.term.placement == "advantage":
            shifted = replace(batch, advantages=advantages)
            advantages = shifted_advantages(shifted, part.term, beta=part.coefficient, gate=part.gate)
    bounds = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    bounds = {} if objective.surrogate == "score_function" else bounds
    tokens = SURROGATES[objective.surrogate](policy, old, advantages, **bounds)
    if objective.trust.there:
        trusted = Trusted.of(batch, objective.trust)
        tokens, metrics = trusted.weights * tokens, trusted.metrics(batch)
    loss = _reduce(tokens, batch.mask, batch.mask, objective.reduction, objective, totals)
    metrics["train/policy_loss"] = loss.detach()
    for part in parts:
        if part.term.placement == "loss":
            kl_loss = part.coefficient * _penalty(batch, part, objective, totals)
            metrics[PENALTIES[part.term.anchor]] = kl_loss.detach()
            loss = loss + kl_loss
    metrics["beta"] = torch.as_tensor(objective.beta, dtype=policy.dtype)
    if objective.surrogate == "ppo_clip":
        clipped = surrogates.ratio_clipped(policy.detach(), old, advantages, **bounds)
        metrics["policy/ratio_clipped"] = masked_mean(clipped.float(), batch.mask)
    for coefficient, term in (Weighted(objective.beta, objective.kl), *objective.others):
        if coefficient <= 0 and batch.anchor_logprobs(term.anchor) is not None:
            metrics |= kl_metrics(batch, term)
    for part in parts:
        metrics |= kl_metrics(batch, part.term, part.known) | ({} if part.gate is None else part.gate.metrics())
    return LossOutput(loss, metrics)


PENALTIES: Mapping[Anchor, str] = {
    "reference": "train/kl_penalty",
    "sampler": "train/kl_penalty",
    "teacher": "train/teacher_penalty",
}
"""Anchor -> the metric that its part of the loss is logged under."""


class _Part(NamedTuple):
    coefficient: float
    term: KLTerm
    known: Distances
    gate: Gate | None

    @classmethod
    def of(cls, batch: Batch, weighted: Weighted) -> _Part:
        known = Distances.of(batch, weighted.term)
        return cls(*weighted, known, Gate.of(batch, weighted.term, known))


def _penalty(batch: Batch, part: _Part, objective: Objective, totals: Totals | None) -> Float[Tensor, ""]:
    penalty = token_penalty(batch, part.term, part.gate, known=part.known)
    reduction, seen = part.term.normalizer or objective.reduction, batch.kl_mask
    if part.term.anchor == "teacher":  # a token that it did not score is a gap in what is known: the price stays
        return _reduce(penalty, batch.mask, batch.mask, reduction, objective, totals)
    counted = batch.mask if seen is None else batch.mask & seen
    return _reduce(penalty, batch.mask, counted, reduction, objective, totals, part="kl")


def without_gradient(batch: Batch, objective: Objective) -> Bool[Tensor, " batch"]:
    """Sequences that the gradient of `grpo_loss` is exactly 0 in, whatever the policy says of them. [B]

    That is: no token is trained, or every advantage is 0 and no KL pulls: its coefficient is 0, it is in the reward
    (and so in the advantages), it has no gradient, no token carries it, or its clip is closed.

    A pass that only serves the gradient can leave them out; values and metrics still need them. Where the KL is
    clipped and `gate_kl` is None, the gate is computed from the batch's own log-probabilities, as `grpo_loss` does.
    """
    advantages = batch.advantages if batch.advantages.ndim == 2 else batch.advantages.unsqueeze(-1)
    moved = ((advantages != 0) & batch.mask).any(-1)
    for _, term in objective.terms:
        moved = moved | _pulled(batch, term)
    return ~moved


def _pulled(batch: Batch, term: KLTerm) -> Bool[Tensor, " batch"]:
    if term.placement == "reward" or (term.placement == "loss" and term.gradient == "none"):
        return torch.zeros_like(batch.mask[:, 0])
    gate = Gate.of(batch, term)
    carried = carries_kl(batch.towards(term.anchor)).any(-1)
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
