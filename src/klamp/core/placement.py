"""The KL in other places than the loss: taken from the reward, or from the advantage.

Only k1 belongs there: as a factor of the score function it gives the gradient of KL(policy || ref); k3 gives the
reverse minus the forward gradient, which cancels to first order near the reference.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import future_sum, masked_sum, upcast
from klamp.core.surrogates import per_token
from klamp.core.types import Advantages, Horizon, LogProbs, Mask, TokenValues
from klamp.errors import ShapeError


def sequence_log_ratio(
    policy_logprobs: LogProbs, ref_logprobs: LogProbs, mask: Mask, *, max_log_ratio: float | None = None
) -> Float[Tensor, " batch"]:
    """The sum of k1 over each sequence, in nats, detached: an unbiased sample of KL(policy || ref) over sequences.

    It is a sum, never a mean over the completion's own length: a mean can be lowered by writing more.
    """
    return masked_sum(masked_log_ratio(policy_logprobs, ref_logprobs, mask, max_log_ratio=max_log_ratio), mask, -1)


def kl_in_reward(
    rewards: Float[Tensor, " batch"],
    sequence_kl: Float[Tensor, " batch"],
    *,
    beta: float,
) -> Float[Tensor, " batch"]:
    """The rewards minus beta times each completion's KL, before advantages are formed.

    Equation: r_i - beta * k_i, with k_i = `sequence_log_ratio` in nats per sequence.

    Sampler: the policy.
    Gradient: none here; through the score function it is the gradient of KL(policy || ref) over sequences, provided
    that the advantages are not divided by the group's standard deviation: in a saturated group that division makes
    beta drop out. Tokens can be left out of k_i by their position only: left out by what they are, the gradient is
    that of no KL (one number per completion cannot hold delta_t for its own token and k3_j for the later ones).
    Shapes: [B], [B] -> [B].

    Raises:
        ShapeError: one KL per reward is needed.

    Source: arXiv:1909.08593; kl-placement and its failure with std-normalised advantages: docs/concepts
    """
    if rewards.shape != sequence_kl.shape:
        raise ShapeError(
            "rewards and KL differ in shape",
            got=f"rewards {tuple(rewards.shape)}, sequence_kl {tuple(sequence_kl.shape)}",
            why="each completion has one reward and one KL, summed over its tokens",
            fix="use sequence_log_ratio to get one KL per completion",
        )
    return upcast(rewards) - beta * sequence_kl.detach()


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

    Raises:
        ShapeError: shapes differ.

    Source: FRPO arXiv:2601.10201 (reward-to-go)
    """
    carried = mask if kl_mask is None else mask & kl_mask
    delta = masked_log_ratio(policy_logprobs, ref_logprobs, carried, max_log_ratio=max_log_ratio)
    shift = delta
    if horizon == "sequence":
        later = delta if kl_mask is None else ESTIMATORS["k3"].value(delta)
        shift = delta + future_sum(later)
    return per_token(advantages, delta) - beta * shift
