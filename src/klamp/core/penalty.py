"""What a KL term does to a batch, without beta: the penalty of the loss, the shift of reward or advantage, the metrics.

A trainer that has a loss of its own adds `token_penalty` to it, or shifts its advantages by `shifted_advantages`;
`grpo_loss` does the same. Of reward and advantage, only k1 belongs there: as a factor of the score function it gives
the gradient of KL(policy || ref); k3 gives the reverse minus the forward gradient, which cancels to first order near
the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import (
    exact_penalty,
    log_weights,
    masked_log_ratio,
    penalty_from_weights,
    saturated_share,
    share_of,
    truncated_share,
)
from klamp.core.masking import future_sum, masked, masked_mean, masked_sum, upcast
from klamp.core.surrogates import per_token
from klamp.core.term import Distances, Gate, KLTerm, carries_kl, require_reference
from klamp.core.types import Advantages, Batch, Horizon, LogProbs, Mask, TokenValues
from klamp.errors import ConfigError, NonFiniteError


def sequence_log_ratio(
    policy_logprobs: LogProbs, ref_logprobs: LogProbs, mask: Mask, *, max_log_ratio: float | None = None
) -> Float[Tensor, " batch"]:
    """The sum of k1 over each sequence, in nats, detached: an unbiased sample of KL(policy || ref) over sequences.

    It is a sum, never a mean over the completion's own length: a mean can be lowered by writing more.
    """
    return masked_sum(masked_log_ratio(policy_logprobs, ref_logprobs, mask, max_log_ratio=max_log_ratio), mask, -1)


def kl_in_advantage(
    advantages: Advantages,
    policy_logprobs: LogProbs,
    ref_logprobs: LogProbs,
    mask: Mask,
    *,
    beta: float | Tensor,
    horizon: Horizon = "sequence",
    max_log_ratio: float | None = None,
    kl_mask: Mask | None = None,
) -> TokenValues:
    """The advantages minus beta times the KL, after they were normalised: beta keeps its meaning in every group.

    Equation: token A_t - beta delta_t; sequence A_t - beta sum_{j >= t} delta_j (reward-to-go). With `kl_mask` delta is
    0 outside of it and the later terms are k3: A_t - beta (delta_t + sum_{j > t} k3_j).

    Sampler: the policy that `policy_logprobs` belong to.
    Gradient: none here; through the score function `sequence` gives the gradient of KL(policy || ref) over sequences,
    `token` that of the KL at each sampled prefix; with `kl_mask` of the generalised KL over the kept tokens, see
    `klamp.core.gradients`.
    Shapes: advantages [B] or [B, T], the others [B, T] -> [B, T]. `beta` may be a tensor that broadcasts over [B, T].

    Source: FRPO arXiv:2601.10201 (reward-to-go)
    """
    carried = mask if kl_mask is None else mask & kl_mask
    delta = masked_log_ratio(policy_logprobs, ref_logprobs, carried, max_log_ratio=max_log_ratio)
    shift = delta
    if horizon == "sequence":
        later = delta if kl_mask is None else ESTIMATORS["k3"].value(delta)
        shift = delta + future_sum(later)
    return per_token(advantages, delta) - beta * shift


def _log_weights(batch: Batch, term: KLTerm) -> Tensor:
    """The off-policy log-weights of the penalty; the prefix ratio runs over all trained tokens, excluded ones too."""
    if term.off_policy == "none" or (term.of_prefixes and term.off_policy == "token"):
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


def token_penalty(
    batch: Batch, term: KLTerm, gate: Gate | None = None, *, known: Distances | None = None
) -> TokenValues:
    """The penalty of each token of a batch in nats, without beta: what a loss adds.

    Equation: c_i * gate_i(penalty_it), penalty as in `kl_penalty` (or `exact_penalty`), c_i the sequence's `kl_weight`.
    A KL that is read at each prefix and holds a sampled tail (`topk_kl`) was given the token's own weight there.

    Sampler: the policy, or with `off_policy` whoever `sampler_logprobs` belong to.
    Value and gradient: the term's, clipped where a gate is given; masked and excluded tokens are exactly 0.
    Shapes: see `Batch` -> [B, T].

    Args:
        batch, term: scored completions, and which KL.
        gate: its clip, from `Gate.of`; None: no clip.
        known: the batch's distances; None: they are formed.

    Raises:
        ConfigError: the anchor, its exact KL or the sampler's log-probabilities are asked for and missing.
        NonFiniteError: the KL to a teacher at some prefix is not finite.
    """
    batch = batch.towards(term.anchor)
    kl_mask, log_w = carries_kl(batch), _log_weights(batch, term)
    excluded = None if batch.kl_mask is None else kl_mask
    if term.value in ("exact", "topk"):
        if batch.exact_kl is None:
            name = "teacher_kl" if term.anchor == "teacher" else "exact_kl"
            raise ConfigError(
                f"the estimator {term.value!r} needs the KL of the batch at each prefix",
                got=f"{name}=None",
                why="it is summed over the vocabulary (or a head of it), from both models' distributions",
                fix=f"set Batch.{name} = exact_kl(policy_logits, ref_logits)",
            )
        known_kl = masked(batch.exact_kl, kl_mask)
        if term.anchor == "teacher":
            _check_finite(known_kl.detach())
        penalty = exact_penalty(
            batch.policy_logprobs,
            known_kl,
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
            (known or Distances.of(batch, term)).bounded,
            log_w,
            batch.mask,
            value=term.value,
            gradient=term.gradient,
            horizon=term.horizon,
            kl_mask=excluded,
        )
    penalty = penalty if gate is None else gate.apply(penalty, kl_mask)
    return penalty if batch.kl_weight is None else penalty * batch.kl_weight.unsqueeze(-1)


def _check_finite(kl: Tensor) -> None:
    if not bool(kl.isfinite().all()):
        raise NonFiniteError(
            "the KL to the teacher is infinite or NaN",
            got=f"{int((~kl.isfinite()).sum())} of {kl.numel()} tokens",
            why="one of the two forbids a word that the other allows, or a row of logits is no distribution",
            fix="use teacher_direction='js', which is finite for any two, or teacher_estimator='k1' with "
            "teacher_max_log_ratio; tokens that the teacher did not score are False in Batch.teacher_mask",
        )


def shifted_rewards(
    rewards: Float[Tensor, " batch"], batch: Batch, term: KLTerm, *, beta: float
) -> Float[Tensor, " batch"]:
    """The rewards minus beta (times `kl_weight`) times the KL of each completion, before advantages are formed. [B]

    Equation: r_i - beta k_i, with k_i = `sequence_log_ratio` in nats, of the policy that sampled. Without a clip, for
    which see `advantages_with_kl`.
    Gradient: none here; through the score function it is the gradient of KL(policy || ref) over sequences, provided
    that the advantages are not divided by the group's standard deviation: in a saturated group that division makes
    beta drop out. Tokens can be left out of k_i by their position only: left out by what they are, the gradient is
    that of no KL (one number per completion cannot hold delta_t for its own token and k3_j for the later ones).

    Source: arXiv:1909.08593; kl-placement and its failure with std-normalised advantages: docs/concepts
    """
    return upcast(rewards) - beta * _spent(batch, term)


def _spent(batch: Batch, term: KLTerm) -> Float[Tensor, " batch"]:
    batch = batch.towards(term.anchor)
    spent = sequence_log_ratio(
        batch.policy_logprobs, require_reference(batch), carries_kl(batch), max_log_ratio=term.max_log_ratio
    )
    return spent if batch.kl_weight is None else spent * batch.kl_weight


def advantages_with_kl(
    rewards: Float[Tensor, " batch"],
    batch: Batch,
    term: KLTerm,
    *,
    beta: float,
    gate: Gate | None,
    advantages: Callable[[Tensor], Tensor],
) -> Float[Tensor, " batch"]:
    """The advantages of rewards from which the KL of each completion was taken, clipped where a gate is given. [B]

    Equation: A(r) - beta g_i A(k)_i, A = `advantages`, g the gate's factor, k as in `shifted_rewards`; without a gate
    A(r - beta k), the same wherever A is linear (scale `none`).

    Gradient: through the score function E[g_i] grad KL(policy || ref). The gate comes after the baseline: that of
    r - beta g k would hold the others' gates, which depend on this completion's tokens.
    """
    if gate is None:
        return advantages(shifted_rewards(rewards, batch, term, beta=beta))
    return advantages(rewards) - beta * gate.factor * advantages(_spent(batch, term))


def shifted_advantages(batch: Batch, term: KLTerm, *, beta: float, gate: Gate | None = None) -> TokenValues:
    """Advantages minus beta times the KL of each token (or of it and all later ones), in units of the advantage. [B, T]

    As `kl_in_advantage`, with the clip's factor and the sequence's `kl_weight` on beta. The KL to a reference is that
    of the old policy, which sampled the tokens. To a teacher it is that of the present one: under the surrogate's
    ratios the old one's would follow KL(policy || teacher) less KL(policy || old).
    """
    batch, now = batch.towards(term.anchor), batch.policy_logprobs.detach()
    old = now if batch.old_logprobs is None or term.anchor == "teacher" else batch.old_logprobs
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
        kl_mask=batch.kl_mask,
    )


def kl_metrics(batch: Batch, term: KLTerm, known: Distances | None = None) -> dict[str, Tensor]:
    """The logged values of a batch's KL: detached scalars, named as in the metrics table; a teacher's by its name."""
    if term.anchor == "teacher":
        return _teacher_metrics(batch.towards("teacher"), known or Distances.of(batch, term))
    metrics: dict[str, Tensor] = {}
    if batch.ref_logprobs is not None or term.anchor == "sampler":
        known = known or Distances.of(batch, term)
        delta, carried = known.log_ratio, known.carried
        k3 = ESTIMATORS["k3"].value(delta)
        metrics = {"kl/k1": masked_mean(delta, carried), "kl/k3": masked_mean(k3, carried)}
        metrics["kl/k3_sequence"] = masked_sum(k3, carried, -1).mean()
        metrics["kl/log_ratio_max"] = delta.abs().amax()
        metrics["kl/k3_saturated"] = saturated_share(known.bounded, carried)
        if term.max_log_ratio is not None:
            metrics["kl/log_ratio_clamped"] = share_of(delta.abs() > term.max_log_ratio, carried)
    if batch.exact_kl is not None:
        metrics["kl/exact"] = masked_mean(batch.exact_kl.detach(), carries_kl(batch))
    if batch.sampler_logprobs is not None and term.max_weight is not None:
        metrics["kl/weights_truncated"] = truncated_share(
            batch.policy_logprobs,
            batch.sampler_logprobs,
            batch.mask,
            horizon=term.weight_horizon,
            max_weight=term.max_weight,
        )
    return metrics


def _teacher_metrics(batch: Batch, known: Distances) -> dict[str, Tensor]:
    delta, carried = known.bounded, known.carried
    value = ESTIMATORS["k3"].value(delta) if batch.exact_kl is None else batch.exact_kl.detach()
    return {
        "teacher/k1": masked_mean(delta, carried),
        "teacher/kl": masked_mean(value, carried),
        "teacher/log_ratio_clamped": share_of(known.log_ratio != delta, carried),
        "teacher/unscored": share_of(~carried, batch.mask),
    }
