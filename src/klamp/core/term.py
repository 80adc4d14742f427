"""The KL of an objective without its coefficient beta: the choices, the tokens that carry it, and the gate of its clip.

What it does to the loss, the reward or the advantage: `klamp.core.penalty`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, check_fields, limited
from klamp.core.clipping import CLIP_TEMPERATURE, ClipLevel, ClipUnit, clip_gate, clip_kl, gate_kl, kl_budget
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import BOUND, check_gradient_choice, saturated
from klamp.core.masking import bounded, masked_log_ratio, masked_sum
from klamp.core.types import (
    FORBIDDEN,
    HELD,
    Batch,
    ClipMethod,
    Gradient,
    Horizon,
    Mask,
    Reduction,
    Scored,
    TokenValues,
    Value,
    argument_of,
)
from klamp.errors import ConfigError

Placement: TypeAlias = Literal["loss", "reward", "advantage"]
OffPolicy: TypeAlias = Literal["none", "token", "sequence"]
TermValue: TypeAlias = Literal[Value, "topk"]
KLBaseline: TypeAlias = Literal["none", "exact", "bucket"]

BUDGET = AT_LEAST_0.but("a KL is never negative", "0.5 nats per token is the default, 0 no free budget")


def gates_on_itself(value: TermValue, gradient: Gradient, horizon: Horizon, off_policy: OffPolicy) -> bool:
    """Whether a completion's own KL may decide its clip: f'(K) grad K is then the gradient of f(K) at its prefixes.

    Any other gradient holds a sampled token (or another divergence) that the gate would be correlated with.
    """
    return value == "exact" and gradient != "forward" and horizon == "token" and off_policy != "sequence"


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """A KL of an objective, in nats: to whom, its value, its gradient, where it enters, its clip; all but beta.

    Equation: see `kl_penalty`. `KLConfig.build_term` and `TeacherConfig.build_term` make one, after refusing the
    combinations that do not do what their names say; those checks are not repeated here.
    """

    anchor: str = "reference"
    """Whom it holds the policy to: a name in `Batch.anchors`."""
    value: TermValue = "k3"
    """Estimator of the value; `exact` and `topk` read it from the batch, with its gradient."""
    gradient: Gradient = "reverse"
    """Whose gradient the loss follows: reverse KL(policy||ref), forward KL(ref||policy), the estimator's own, none."""
    horizon: Horizon = "token"
    """token: each token's own KL; sequence: also the effect of a token on the KL of later tokens."""
    placement: Placement = "loss"
    """In the loss, in the reward (before advantages are formed), or as a shift of the advantage (after)."""
    off_policy: OffPolicy = "none"
    """Weigh the KL by policy/sampler: not at all, per token, or by the whole prefix (exact, noisier)."""
    max_weight: float | None = limited(None, BOUND)
    """Upper bound of the off-policy weight policy/sampler; how often it binds is logged."""
    max_log_ratio: float | None = limited(None, BOUND)
    """Straight-through bound of the log-ratio in nats; how often it binds is logged."""
    beyond: str = ""
    """The anchor (a teacher) that a negative coefficient of this term leads beyond; empty: the coefficient is >= 0."""
    baseline: KLBaseline = "none"
    """The KL at the prefix that is taken from a sampled token's log-ratio: none, exact, or with a bucket as tail."""
    max_teacher_log_ratio: float | None = limited(None, BOUND)
    """Bound of log teacher - log reference in nats, for a negative coefficient; how often it binds is logged."""
    clip_method: ClipMethod = "none"
    """How the KL is clipped at its budget: none, hard (no pull below the budget), or soft."""
    clip_threshold: float = limited(0.5, BUDGET)
    """KL budget: nats per token of the reference length, or nats in total."""
    clip_temperature: float = limited(1.0, CLIP_TEMPERATURE)
    """Width of the soft clip in nats of the total."""
    clip_level: ClipLevel = "group"
    """Whose KL opens the gate; `sequence` is `group` where a sampled KL would have to decide on itself."""
    clip_unit: ClipUnit = "token"
    """What the threshold is for: a token (times the reference length), or the whole sequence."""
    normalizer: Reduction | None = None
    """Reduction of the KL over tokens; None: the policy loss's."""
    mean_over: Literal["carried", "trained"] = "carried"
    """Which tokens a mean counts: those that carry the KL, or all that are trained on, so that a token without a score
    is a gap and does not raise the price of the others."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_gradient_choice("exact" if self.of_prefixes else self.value, self.gradient, self.horizon)

    @property
    def weight_horizon(self) -> Horizon:
        """Whether a token's off-policy weight is its own ratio, or the prefix's up to it."""
        return "sequence" if self.off_policy == "sequence" else "token"

    @property
    def of_prefixes(self) -> bool:
        """Whether the batch holds its value at each prefix, from whole distributions or their heads."""
        return self.value in ("exact", "topk")

    @property
    def follows_reverse(self) -> bool:
        """Whether its gradient is the reverse KL's, without a clip: bounded also with a negative coefficient."""
        own = self.gradient == "own" and (self.of_prefixes or self.value == "k2")
        return self.clip_method == "none" and (self.gradient == "reverse" or own)

    @property
    def needs_reference_length(self) -> bool:
        """Whether a budget is made of a threshold per token and a length."""
        return self.clip_method != "none" and self.clip_unit == "token"


def scored_by(
    batch: Batch, anchor: str, *, user: str = "", otherwise: str = "set the coefficient of that KL (beta) to 0"
) -> Scored:
    """What an anchor says about the batch; refuses a batch that it has not scored. `user` needs it; empty: a KL."""
    if anchor not in batch.anchors:
        raise ConfigError(
            f"{user or f'a KL to the {anchor}'} needs the {anchor}'s log-probabilities",
            got=f"{argument_of(anchor)}=None",
            why="leaving it out silently would train without it",
            fix=f"score the batch with the {anchor}: Batch(anchors={{{anchor!r}: Scored(logprobs)}}), or {otherwise}",
        )
    return batch.anchors[anchor]


def carries_kl(batch: Batch, anchor: str = "reference") -> Mask:
    """Which tokens carry the KL to an anchor: trained on, scored by it, and not excluded. [B, T]"""
    mask = batch.anchors[anchor].mask if anchor in batch.anchors else None
    return batch.mask if mask is None else batch.mask & mask


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A KL term on one batch: what its penalty, its gate and its metrics are made of, computed once and detached."""

    term: KLTerm
    batch: Batch
    scored: Scored
    """What the term's anchor says."""
    carried: Mask
    """True = the token carries the KL. [B, T]"""
    log_ratio: TokenValues
    """log policy - log anchor; 0 where a token carries no KL. [B, T]"""
    bounded: TokenValues
    """The same within the term's bound, `max_log_ratio`. [B, T]"""
    gate: Gate | None = None
    """Its clip; None: the term has no clip."""
    is_beside: bool = False
    """Whether it is a KL to the sampler beside the run's own to the reference."""

    @property
    def excluded(self) -> Mask | None:
        """The tokens that carry the KL if some may be left out, else None. [B, T]"""
        return None if self.scored.mask is None else self.carried


def measure(batch: Batch, term: KLTerm) -> Prepared:
    """A term on a batch, without its clip; refuses a batch without the log-probabilities of the term's anchor."""
    scored, carried = scored_by(batch, term.anchor), carries_kl(batch, term.anchor)
    if (other := batch.anchors.get(term.beyond)) is not None:
        scored, carried = _beside(scored, other, term.max_teacher_log_ratio), carried & carries_kl(batch, term.beyond)
    delta = masked_log_ratio(batch.policy_logprobs, scored.logprobs, carried)
    return Prepared(
        term=term,
        batch=batch,
        scored=scored,
        carried=carried,
        log_ratio=delta,
        bounded=bounded(delta, term.max_log_ratio),
    )


def _beside(scored: Scored, teacher: Scored, bound: float | None) -> Scored:
    """An anchor's part beside a teacher's, whose mask counts too; log teacher - log anchor is bounded."""
    logprobs = scored.logprobs
    if bound is not None:  # of -inf there is no bound: it is refused
        raised = torch.maximum(logprobs, (teacher.logprobs - bound).to(logprobs.dtype))
        logprobs = torch.where(logprobs > FORBIDDEN, raised, logprobs)
    mask = teacher.mask if scored.mask is None else scored.mask  # here only whether some tokens may be left out
    return scored._replace(logprobs=logprobs, mask=mask)


def prepare(batch: Batch, term: KLTerm) -> Prepared:
    """A term on a batch, with its clip."""
    prepared = measure(batch, term)
    return prepared if term.clip_method == "none" else replace(prepared, gate=Gate.of(prepared))


class Weighted(NamedTuple):
    """A KL with its coefficient, in reward per nat."""

    coefficient: float
    term: KLTerm


def prepare_terms(batch: Batch, terms: Sequence[Weighted]) -> list[tuple[float, Prepared]]:
    """The terms in force, each with its coefficient; with coefficient 0 those that are only measured."""
    there = [(x, t) for x, t in terms if t.anchor in batch.anchors or (x != 0 and t.placement != "reward")]
    beside = "sampler" if {*HELD} <= {term.anchor for _, term in there} else None
    prepared = [(x, prepare(batch, term) if x != 0 else measure(batch, term)) for x, term in there]
    return [(x, replace(one, is_beside=one.term.anchor == beside)) for x, one in prepared]


class Gate(NamedTuple):
    """The clip of a batch, for each sequence. All [B]."""

    kl: Tensor  # the KL that decides the clip, in nats
    budget: Tensor  # the KL at which the penalty begins, in nats
    factor: Tensor  # the derivative of the clipped KL by the KL, in [0, 1]: the factor on the gradient
    clipped: Tensor  # the KL after the clip

    @classmethod
    def of(cls, prepared: Prepared) -> Gate:
        """The gate of a term that has a clip."""
        term, kl, length = prepared.term, prepared.scored.gate, prepared.batch.reference_length
        kl = sequence_gate_kl(prepared) if kl is None else kl
        budget = kl_budget(term.clip_threshold, per_token=term.clip_unit == "token", reference_length=length)
        limit = torch.as_tensor(budget, dtype=kl.dtype, device=kl.device).expand_as(kl)
        factor, clipped = (
            clip(kl, limit, method=term.clip_method, temperature=term.clip_temperature) for clip in (clip_gate, clip_kl)
        )
        return cls(kl, limit, factor, clipped)

    def apply(self, penalty: TokenValues, kl_mask: Mask) -> TokenValues:
        """The penalty with the clip f: its tangent f(m) + f'(m) (K - m) at the KL m that decides it.

        Value: summed over the sequence it is that, K the sum of `penalty`, with f(m) - f'(m) m spread over the tokens
        that carry the KL: f(K) if m is K itself; if m is the others', unbiased for the tangent, never above f(KL).
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
    prepared: Prepared, *, gather: Callable[[Tensor], Tensor] | None = None, rank: int = 0
) -> Float[Tensor, " batch"]:
    """The KL (nats per sequence) that decides the clip of each sequence of a batch: `gate_kl` of `sequence_kl`.

    Args:
        prepared: the term on whole groups, or on parts that `gather` puts together; with a KL at each prefix
            only if every sequence has it. Sequences without a trained token count in no mean.
        gather, rank: the tensors of all processes, one after the other (None: this batch is all); the own place there.
    """
    term, batch = prepared.term, prepared.batch
    kl, measured = sequence_kl(prepared), batch.mask.any(-1)
    everywhere = torch.stack([kl, measured.to(kl.dtype)], -1)
    everywhere = everywhere if gather is None else gather(everywhere)
    alone = gates_on_itself(term.value, term.gradient, term.horizon, term.off_policy)
    own = prepared.scored.kl is not None and alone
    means = gate_kl(
        everywhere[:, 0],
        level="group" if term.clip_level == "sequence" and not own else term.clip_level,
        group_size=batch.group_size,
        own=own,
        measured=everywhere[:, 1] > 0,
    )
    return means[rank * len(kl) :][: len(kl)]


def sequence_kl(prepared: Prepared) -> Float[Tensor, " batch"]:
    """The KL of each sequence over the tokens that carry it, in nats: exact where every sequence has that, else k3."""
    kl = prepared.scored.kl
    kl = saturated(ESTIMATORS["k3"].value(prepared.bounded), prepared.bounded) if kl is None else kl.detach()
    return masked_sum(kl, prepared.carried, -1)
