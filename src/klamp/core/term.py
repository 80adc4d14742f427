"""The KL of an objective without its coefficient beta: the choices, the tokens that carry it, and the gate of its clip.

What it does to the loss, the reward or the advantage: `klamp.core.penalty`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, check_fields
from klamp.core.clipping import CLIP_TEMPERATURE, ClipLevel, ClipUnit, clip_gate, clip_kl, gate_kl, kl_budget
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import BOUND, masked_log_ratio, saturated
from klamp.core.masking import masked_sum
from klamp.core.types import Anchor, Batch, ClipMethod, Gradient, Horizon, Mask, Reduction, TokenValues, Value
from klamp.errors import ConfigError

Placement: TypeAlias = Literal["loss", "reward", "advantage"]
OffPolicy: TypeAlias = Literal["none", "token", "sequence"]
TermValue: TypeAlias = Literal[Value, "topk"]

TERM_NUMBERS = {
    "max_weight": BOUND,
    "max_log_ratio": BOUND,
    "clip_threshold": AT_LEAST_0.but("a KL is never negative", "0.5 nats per token is the default, 0 no free budget"),
    "clip_temperature": CLIP_TEMPERATURE,
}
"""Which numbers the fields of `KLTerm` take; those of `KLConfig` that they come from take the same."""


def gates_on_itself(value: TermValue, gradient: Gradient, horizon: Horizon, off_policy: OffPolicy) -> bool:
    """Whether a completion's own KL may decide its clip: f'(K) grad K is then the gradient of f(K) at its prefixes.

    Any other gradient holds a sampled token (or another divergence) that the gate would be correlated with.
    """
    return value == "exact" and gradient != "forward" and horizon == "token" and off_policy != "sequence"


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """A KL of an objective, in nats: to whom, its value, its gradient, where it enters, its clip; all but beta.

    Equation: see `kl_penalty` (loss), `KLConfig` for what each choice means. `KLConfig.build_term` and
    `TeacherConfig.build_term` make one, after refusing the combinations that do not do what their names say; those
    checks are not repeated here.
    """

    anchor: Anchor = "reference"
    """Whom it holds the policy to: which fields of a batch it reads, see `Batch.towards`."""
    value: TermValue = "k3"
    """Estimator of the value; `exact` and `topk` read it from the batch, with its gradient."""
    gradient: Gradient = "reverse"
    """Which divergence's gradient flows."""
    horizon: Horizon = "token"
    """Whether a token's effect on the KL of later tokens counts."""
    placement: Placement = "loss"
    """Where the KL enters; `reward` is applied before the advantages are formed, so grpo_loss adds nothing."""
    off_policy: OffPolicy = "none"
    """Weight by policy / sampler: not at all, per token, or by the ratio of the whole prefix."""
    max_weight: float | None = None
    """Upper bound of the off-policy weight."""
    max_log_ratio: float | None = None
    """Straight-through bound of the log-ratio, in nats."""
    clip_method: ClipMethod = "none"
    """How the KL is clipped at its budget."""
    clip_threshold: float = 0.5
    """Nats per token, or in total."""
    clip_temperature: float = 1.0
    """Width of the soft clip, in nats."""
    clip_level: ClipLevel = "group"
    """Whose KL opens the gate; `sequence` is `group` where a sampled KL would have to decide on itself."""
    clip_unit: ClipUnit = "token"
    """What the threshold is for: a token (times the reference length), or the whole sequence."""
    normalizer: Reduction | None = None
    """Reduction of the KL; None: that of the surrogate."""

    def __post_init__(self) -> None:
        check_fields(self, TERM_NUMBERS)

    @property
    def weight_horizon(self) -> Horizon:
        """Whether a token's off-policy weight is its own ratio, or that of the prefix up to it."""
        return "sequence" if self.off_policy == "sequence" else "token"

    @property
    def of_prefixes(self) -> bool:
        """Whether the batch holds its value at each prefix, from whole distributions or their heads."""
        return self.value in ("exact", "topk")

    @property
    def needs_reference_length(self) -> bool:
        """Whether a budget is made of a threshold per token and a length."""
        return self.clip_method != "none" and self.clip_unit == "token"


def carries_kl(batch: Batch) -> Mask:
    """Which tokens carry the KL: trained on, and not excluded. [B, T]"""
    return batch.mask if batch.kl_mask is None else batch.mask & batch.kl_mask


def require_reference(batch: Batch) -> Tensor:
    """The reference's log-probabilities; a batch without them is refused."""
    if batch.ref_logprobs is None:
        raise ConfigError(
            "beta is positive and the batch has no reference log-probabilities",
            got="ref_logprobs=None",
            why="a KL needs a reference; leaving it out silently would train without one",
            fix="score the batch with the reference, or set beta=0",
        )
    return batch.ref_logprobs


@dataclass(frozen=True, kw_only=True)
class Distances:
    """How far the policy is from a term's anchor at each token of a batch, in nats, detached. All [B, T].

    Gate, penalty and metrics are made of it. The anchor of a term enters here, and beside it as the batch's exact KL.
    """

    carried: Mask
    """True = the token carries the KL."""
    log_ratio: TokenValues
    """log policy - log anchor; 0 where a token carries no KL."""
    bounded: TokenValues
    """The same within the term's bound, `max_log_ratio`."""

    @classmethod
    def of(cls, batch: Batch, term: KLTerm) -> Distances:
        """Those of a batch to the term's anchor."""
        batch, bound = batch.towards(term.anchor), term.max_log_ratio
        carried = carries_kl(batch)
        delta = masked_log_ratio(batch.policy_logprobs, require_reference(batch), carried)
        return cls(carried=carried, log_ratio=delta, bounded=delta if bound is None else delta.clamp(-bound, bound))


@dataclass(frozen=True)
class Gate:
    """The clip of a batch: the KL and the budget of each sequence in nats, and the factor on the gradient. All [B]."""

    kl: Tensor
    """The KL of each sequence that decides the clip, in nats."""
    budget: Tensor
    """The KL of each sequence at which the penalty begins, in nats."""
    factor: Tensor
    """The derivative of the clipped KL by the KL, in [0, 1]: the factor on the gradient."""
    clipped: Tensor
    """The KL after the clip."""

    @classmethod
    def of(cls, batch: Batch, term: KLTerm, known: Distances | None = None) -> Gate | None:
        """The gate of a batch under a term, whose distances may be known; None where the term has no clip."""
        if term.clip_method == "none":
            return None
        batch = batch.towards(term.anchor)
        kl = batch.gate_kl if batch.gate_kl is not None else sequence_gate_kl(batch, term, known=known)
        length, per_token = batch.reference_length, term.clip_unit == "token"
        budget = kl_budget(term.clip_threshold, per_token=per_token, reference_length=length)
        limit = torch.as_tensor(budget, dtype=kl.dtype, device=kl.device).expand_as(kl)
        factor, clipped = (
            clip(kl, limit, method=term.clip_method, temperature=term.clip_temperature) for clip in (clip_gate, clip_kl)
        )
        return cls(kl, limit, factor, clipped)

    def apply(self, penalty: TokenValues, kl_mask: Mask) -> TokenValues:
        """The penalty with the clip f: its tangent f(m) + f'(m) (K - m) at the KL m that decides it.

        Value: summed over the sequence it is that, K the sum of `penalty`, with f(m) - f'(m) m spread over the tokens
        that carry the KL. Where m is K itself it is f(K). Where m is the others' it is unbiased for the tangent at m
        (hard: P(m > budget) (KL - budget)), which is never above f(KL), and f(KL) itself where m has no noise.
        Gradient: f'(m) times the penalty's.
        """
        shift = (self.clipped - self.factor * self.kl) / kl_mask.sum(-1).clamp(min=1)
        factor = self.factor.unsqueeze(-1)
        value = factor * penalty + torch.where(kl_mask, shift.unsqueeze(-1), torch.zeros_like(penalty))
        return torch.where(factor > 0, value, torch.zeros_like(penalty))

    def metrics(self) -> dict[str, Tensor]:
        """The mean budget and KL in nats per sequence, and the share of sequences over budget."""
        return {
            "kl/budget": self.budget.mean(),
            "kl/before_clip": self.kl.mean(),
            "kl/after_clip": self.clipped.mean(),
            "kl/over_budget": (self.kl > self.budget).float().mean(),
        }


def sequence_gate_kl(
    batch: Batch,
    term: KLTerm,
    *,
    gather: Callable[[Tensor], Tensor] | None = None,
    rank: int = 0,
    known: Distances | None = None,
) -> Float[Tensor, " batch"]:
    """The KL (nats per sequence) that decides the clip of each sequence of a batch, see `gate_kl`.

    Equation: of `sequence_kl`, the sequence's own or a mean over its group or batch, which holds the sequence itself
    only where `gates_on_itself` and the KL is exact.

    Args:
        batch, term: whole groups, or parts of them that `gather` puts together; with `exact_kl` only where every
            sequence has it. Sequences without a trained token count in no mean.
        gather, rank: the tensors of all processes, one after the other (None: this batch is all); the own place there.
        known: the batch's distances; None: they are formed.
    """
    batch = batch.towards(term.anchor)
    kl, measured = sequence_kl(batch, term, known), batch.mask.any(-1)
    everywhere = torch.stack([kl, measured.to(kl.dtype)], -1)
    everywhere = everywhere if gather is None else gather(everywhere)
    alone = gates_on_itself(term.value, term.gradient, term.horizon, term.off_policy)
    own = batch.exact_kl is not None and alone
    found = gate_kl(
        everywhere[:, 0],
        level="group" if term.clip_level == "sequence" and not own else term.clip_level,
        group_size=batch.group_size,
        own=own,
        measured=everywhere[:, 1] > 0,
    )
    return found[rank * len(kl) :][: len(kl)]


def sequence_kl(batch: Batch, term: KLTerm, known: Distances | None = None) -> Float[Tensor, " batch"]:
    """The KL of each sequence over the tokens that carry it, in nats: exact where every sequence has that, else k3."""
    if batch.exact_kl is not None:
        return masked_sum(batch.exact_kl.detach(), carries_kl(batch), -1)
    known = known or Distances.of(batch, term)
    return masked_sum(saturated(ESTIMATORS["k3"].value(known.bounded), known.bounded), known.carried, -1)
