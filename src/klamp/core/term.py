"""The KL term of a batch without its coefficient beta: penalty, clip, and its places in reward and advantage.

A trainer that has a loss of its own adds `token_penalty` to it, or shifts its advantages by `shifted_advantages`;
`grpo_loss` does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, POSITIVE
from klamp.core.clipping import ClipLevel, ClipUnit, clip_gate, clip_kl, gate_kl, kl_budget
from klamp.core.estimators import ESTIMATORS
from klamp.core.fields import check_fields
from klamp.core.gradients import (
    clamped_share,
    exact_penalty,
    log_weights,
    masked_log_ratio,
    penalty_from_weights,
    saturated,
    saturated_share,
    truncated_share,
)
from klamp.core.masking import masked, masked_mean, masked_sum
from klamp.core.placement import kl_in_advantage, kl_in_reward, sequence_log_ratio
from klamp.core.types import (
    Batch,
    ClipMethod,
    Gradient,
    Horizon,
    Mask,
    Reduction,
    TokenValues,
    Value,
)
from klamp.errors import ConfigError

Placement: TypeAlias = Literal["loss", "reward", "advantage"]
OffPolicy: TypeAlias = Literal["none", "token", "sequence"]


_BOUND = ("it bounds a magnitude", "use None for no bound")
TERM_NUMBERS = {
    "max_weight": POSITIVE.but(*_BOUND),
    "max_log_ratio": POSITIVE.but(*_BOUND),
    "clip_threshold": AT_LEAST_0.but("a KL is never negative", "0.5 nats per token is the default, 0 no free budget"),
    "clip_temperature": POSITIVE.but("it is the width of the soft clip", "use a tenth of the total budget"),
}
"""Which numbers the fields of `KLTerm` take; those of `KLConfig` that they come from take the same."""


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """The KL of an objective, in nats: its value, its gradient, where it enters, how it is clipped; all but beta.

    Equation: see `kl_penalty` (loss), `KLConfig` for what each choice means. `KLConfig.build_term` makes one, after
    refusing the combinations that do not do what their names say; those checks are not repeated here.
    """

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
    def needs_reference_length(self) -> bool:
        """Whether a budget is made of a threshold per token and a length."""
        return self.clip_method != "none" and self.clip_unit == "token"


def carries_kl(batch: Batch) -> Mask:
    """Which tokens carry the KL: trained on, not excluded, and in a sequence whose KL weight is not 0. [B, T]"""
    mask = batch.mask if batch.kl_mask is None else batch.mask & batch.kl_mask
    return mask if batch.kl_weight is None else mask & (batch.kl_weight > 0).unsqueeze(-1)


def require_reference(batch: Batch) -> Tensor:
    """The reference's log-probabilities; in sequences of KL weight 0 the policy's own, so that their KL is 0.

    Raises:
        ConfigError: the batch has none.
    """
    if batch.ref_logprobs is None:
        raise ConfigError(
            "beta is positive and the batch has no reference log-probabilities",
            got="ref_logprobs=None",
            why="a KL needs a reference; leaving it out silently would train without one",
            fix="score the batch with the reference, or set beta=0",
        )
    if batch.kl_weight is None:
        return batch.ref_logprobs
    scored = (batch.kl_weight > 0).unsqueeze(-1)
    return torch.where(scored, batch.ref_logprobs, batch.policy_logprobs.detach())


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
    def of(cls, batch: Batch, term: KLTerm) -> Gate | None:
        """The gate of a batch under a term; None where the term has no clip.

        Raises:
            ConfigError: no reference, or a threshold per token without a reference length.
        """
        if term.clip_method == "none":
            return None
        kl = batch.gate_kl if batch.gate_kl is not None else sequence_gate_kl(batch, term)
        length, per_token = batch.reference_length, term.clip_unit == "token"
        budget = kl_budget(term.clip_threshold, per_token=per_token, reference_length=length)
        limit = torch.as_tensor(budget, dtype=kl.dtype, device=kl.device).expand_as(kl)
        factor = clip_gate(kl, limit, method=term.clip_method, temperature=term.clip_temperature)
        clipped = clip_kl(kl, limit, method=term.clip_method, temperature=term.clip_temperature)
        return cls(kl, limit, factor, clipped)

    def apply(self, penalty: TokenValues, kl_mask: Mask) -> TokenValues:
        """The penalty with the clip: its value is lowered to the clipped KL, its gradient multiplied by the factor."""
        shift = (self.clipped - self.kl) / kl_mask.sum(-1).clamp(min=1)
        factor = self.factor.unsqueeze(-1)
        open_here = (factor > 0) & kl_mask
        value = torch.where(open_here, penalty.detach() + shift.unsqueeze(-1), torch.zeros_like(penalty))
        return value + factor * (penalty - penalty.detach())

    def metrics(self) -> dict[str, Tensor]:
        """The mean budget and KL in nats per sequence, and the share of sequences over budget."""
        return {
            "kl/budget": self.budget.mean(),
            "kl/before_clip": self.kl.mean(),
            "kl/after_clip": self.clipped.mean(),
            "kl/over_budget": (self.kl > self.budget).float().mean(),
        }


def sequence_gate_kl(
    batch: Batch, term: KLTerm, *, mean: Callable[[Tensor], Tensor] = torch.mean
) -> Float[Tensor, " batch"]:
    """The KL (nats per sequence) that decides the clip, with little noise; the batch must hold whole groups.

    Args:
        batch: with `exact_kl` only where every sequence has it.
        term: says the level.
        mean: of the level `batch`; one over all processes makes the gate independent of how the batch is split.
    """
    per_sequence, level = sequence_kl(batch, term), gate_level(batch, term)
    if level == "batch":
        return mean(per_sequence).expand_as(per_sequence)
    return gate_kl(per_sequence, level=level, group_size=batch.group_size)


def sequence_kl(batch: Batch, term: KLTerm) -> Float[Tensor, " batch"]:
    """What a clip is gated on, before any mean: each sequence's exact KL where it is at hand, else its k3, in nats."""
    kl_mask = carries_kl(batch)
    if batch.exact_kl is not None:
        return masked_sum(batch.exact_kl.detach(), kl_mask, -1)
    delta = _log_ratio(batch, term, kl_mask)
    return masked_sum(saturated(ESTIMATORS["k3"].value(delta), delta), kl_mask, -1)


def gate_level(batch: Batch, term: KLTerm) -> ClipLevel:
    """Whose mean KL gates the clip: as asked, but a sampled KL is too noisy to gate less than its group."""
    return "group" if batch.exact_kl is None and term.clip_level == "sequence" else term.clip_level


def _log_ratio(batch: Batch, term: KLTerm, kl_mask: Mask) -> TokenValues:
    return masked_log_ratio(batch.policy_logprobs, require_reference(batch), kl_mask, max_log_ratio=term.max_log_ratio)


def _log_weights(batch: Batch, term: KLTerm) -> Tensor:
    """The off-policy log-weights of the penalty; the prefix ratio runs over all trained tokens, excluded ones too."""
    exact = term.value == "exact"
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
        horizon=term.weight_horizon,
        max_weight=term.max_weight,
    )


def token_penalty(batch: Batch, term: KLTerm, gate: Gate | None = None) -> TokenValues:
    """The penalty of each token of a batch in nats, without beta: what a loss adds.

    Equation: c_i * gate_i(penalty_it), penalty as in `kl_penalty` (or `exact_penalty`), c_i the sequence's `kl_weight`.

    Sampler: the policy, or with `off_policy` whoever `sampler_logprobs` belong to.
    Value and gradient: the term's, clipped where a gate is given; masked and excluded tokens are exactly 0.
    Shapes: see `Batch` -> [B, T].

    Args:
        batch: scored completions.
        term: which KL.
        gate: its clip, from `Gate.of`; None: no clip.

    Raises:
        ConfigError: the reference, the exact KL or the sampler's log-probabilities are asked for and missing.
    """
    kl_mask, log_w = carries_kl(batch), _log_weights(batch, term)
    excluded = None if batch.kl_mask is None else kl_mask
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
            masked(batch.exact_kl, kl_mask),
            log_w,
            batch.mask,
            gradient=term.gradient,
            horizon=term.horizon,
            surrogate=None if batch.exact_kl_forward is None else masked(batch.exact_kl_forward, kl_mask),
            kl_mask=excluded,
        )
    else:
        penalty = penalty_from_weights(
            batch.policy_logprobs,
            _log_ratio(batch, term, kl_mask),
            log_w,
            batch.mask,
            value=term.value,
            gradient=term.gradient,
            horizon=term.horizon,
            kl_mask=excluded,
        )
    penalty = penalty if gate is None else gate.apply(penalty, kl_mask)
    return penalty if batch.kl_weight is None else penalty * batch.kl_weight.unsqueeze(-1)


def shifted_rewards(
    rewards: Float[Tensor, " batch"], batch: Batch, term: KLTerm, *, beta: float, gate: Gate | None = None
) -> Float[Tensor, " batch"]:
    """The rewards minus beta times the KL of each completion (k1 summed over it), before advantages are formed. [B]

    As `kl_in_reward`, with the clip's factor and the sequence's `kl_weight` on beta. `batch.policy_logprobs` are those
    of the policy that sampled the tokens.

    Raises:
        ConfigError: the batch has no reference log-probabilities.
    """
    spent = sequence_log_ratio(
        batch.policy_logprobs, require_reference(batch), carries_kl(batch), max_log_ratio=term.max_log_ratio
    )
    for factor in (None if gate is None else gate.factor, batch.kl_weight):
        spent = spent if factor is None else spent * factor
    return kl_in_reward(rewards, spent, beta=beta)


def shifted_advantages(batch: Batch, term: KLTerm, *, beta: float, gate: Gate | None = None) -> TokenValues:
    """Advantages minus beta times the KL of each token (or of it and all later ones), in units of the advantage. [B, T]

    As `kl_in_advantage`, with the clip's factor and the sequence's `kl_weight` on beta. The KL is that of the old
    policy, which sampled the tokens.

    Raises:
        ConfigError: the batch has no reference log-probabilities.
    """
    old = batch.policy_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    factor = torch.ones_like(batch.mask[:, 0], dtype=old.dtype) if gate is None else gate.factor
    if batch.kl_weight is not None:
        factor = factor * batch.kl_weight
    return kl_in_advantage(
        batch.advantages,
        old,
        require_reference(replace(batch, policy_logprobs=old)),
        carries_kl(batch),
        beta=beta * factor.unsqueeze(-1),
        horizon=term.horizon,
        max_log_ratio=term.max_log_ratio,
    )


def kl_metrics(batch: Batch, term: KLTerm) -> dict[str, Tensor]:
    """The logged values of a batch's KL: detached scalars, named as in the metrics table."""
    metrics: dict[str, Tensor] = {}
    kl_mask = carries_kl(batch)
    if batch.ref_logprobs is not None:
        ref = require_reference(batch)
        delta = masked_log_ratio(batch.policy_logprobs, ref, kl_mask)
        metrics = {f"kl/{name}": masked_mean(ESTIMATORS[name].value(delta), kl_mask) for name in ("k1", "k3")}
        metrics["kl/k3_sequence"] = _over_sequences(masked_sum(ESTIMATORS["k3"].value(delta), kl_mask, -1), batch)
        metrics["kl/log_ratio_max"] = delta.abs().amax()
        metrics["kl/k3_saturated"] = saturated_share(_log_ratio(batch, term, kl_mask), kl_mask)
        if term.max_log_ratio is not None:
            bound = term.max_log_ratio
            metrics["kl/log_ratio_clamped"] = clamped_share(batch.policy_logprobs, ref, kl_mask, max_log_ratio=bound)
    if batch.exact_kl is not None:
        metrics["kl/exact"] = masked_mean(batch.exact_kl.detach(), kl_mask)
    if batch.sampler_logprobs is not None and term.max_weight is not None:
        metrics["kl/weights_truncated"] = truncated_share(
            batch.policy_logprobs,
            batch.sampler_logprobs,
            batch.mask,
            horizon=term.weight_horizon,
            max_weight=term.max_weight,
        )
    return metrics


def _over_sequences(per_sequence: Tensor, batch: Batch) -> Tensor:
    """The mean over the sequences that the reference scored."""
    if batch.kl_weight is None:
        return per_sequence.mean()
    return masked_mean(per_sequence, batch.kl_weight > 0)
