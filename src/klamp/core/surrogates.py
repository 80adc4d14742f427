"""The policy losses, per token, and the trust region to the sampler that weighs them.

Each loss is to be minimised: its gradient raises the probability of good tokens. All take [B, T] log-probabilities and
advantages [B] or [B, T], and return [B, T]. r = policy / old = exp(log policy - log old), A = advantage, sg =
stop-gradient.

The trust region weighs the sampler's tokens by w = old policy / sampler, of a token or of its whole completion. With w
the surrogate's gradient is that of tokens which the old policy drew; bounding w trades that for less noise:

    truncate    min(max(w, low), high): biased towards the sampler, and bounded
    mask        w where low <= w <= high, else 0: what is far is dropped

DeepSeek-V3.2's mask drops completions of a negative advantage whose mean log(sampler / policy) exceeds a threshold.
Each of them changes which objective is followed.

A mask is decided by the advantage of the reward. A KL in the advantage stays outside of it, with the weight w of its
own token: masked with the rest, its gradient would be off by a quarter and more, and where the policy moved most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, FROM_0_TO_1, POSITIVE, check_fields, limited
from klamp.core.masking import log_ratio, masked_log_ratio, masked_mean, masked_sum, share_of, upcast
from klamp.core.term import scored_by
from klamp.core.types import Advantages, Batch, LogProbs, TokenValues
from klamp.errors import ConfigError


def per_token(advantages: Advantages, like: TokenValues) -> TokenValues:
    """The advantages as [B, T]: an advantage of a whole sequence is repeated for each of its tokens."""
    advantages = upcast(advantages)
    return (advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages).expand_as(like)


def importance_ratio(policy_logprobs: LogProbs, old_logprobs: LogProbs) -> TokenValues:
    """The ratio r of each token, with the old policy detached."""
    return log_ratio(policy_logprobs, old_logprobs.detach()).exp()


_BOUNDS = (
    "it is a distance from 1: the ratio is clipped to [1 - clip_low, 1 + clip_high]",
    "use values like 0.2 (and 0.28 above, as DAPO does)",
)
CLIP_LOW, CLIP_HIGH = FROM_0_TO_1.but(*_BOUNDS), AT_LEAST_0.but(*_BOUNDS)
"""Which ratio bounds below and above 1 there are."""


def ppo_clip(
    policy_logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenValues:
    """The clipped surrogate of PPO and GRPO, per token, to be minimised; the old policy sampled.

    Equation: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
    Gradient: -r A grad log policy inside the bounds, 0 where the ratio has already moved past them in the direction
    of the advantage.

    Source: PPO arXiv:1707.06347; separate bounds DAPO arXiv:2503.14476
    """
    ratio = importance_ratio(policy_logprobs, old_logprobs)
    a = per_token(advantages, ratio)
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)


def cispo(
    policy_logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> TokenValues:
    """The clipped importance-weight loss of CISPO, per token, to be minimised; the old policy sampled.

    Equation: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy.
    Gradient: -clip(r) A grad log policy: every token keeps a gradient, the weight is bounded. The paper has no lower
    bound, which is clip_low = 1; LossConfig's epsilon of 0.2 cuts weights below 0.8.

    Source: MiniMax-M1 arXiv:2506.13585
    """
    ratio = importance_ratio(policy_logprobs, old_logprobs).detach()
    a = per_token(advantages, ratio)
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * a * upcast(policy_logprobs)


def score_function(policy_logprobs: LogProbs, old_logprobs: LogProbs, advantages: Advantages) -> TokenValues:
    """The plain score-function loss (REINFORCE), per token, to be minimised; biased off-policy.

    Equation: -A log policy; the old log-probabilities are not used.
    """
    return -per_token(advantages, policy_logprobs) * upcast(policy_logprobs)


def ratio_clipped(
    policy_logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Which tokens get no gradient from the clipped surrogate: the ratio is past its bound. [B, T]"""
    ratio = importance_ratio(policy_logprobs.detach(), old_logprobs)
    a = per_token(advantages, ratio)
    return ((ratio < 1 - clip_low) & (a < 0)) | ((ratio > 1 + clip_high) & (a > 0))


TrustMode: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

TRUST_LOW = AT_LEAST_0.but("it bounds a ratio of probabilities from below", "leave it out for no lower bound")
TRUST_HIGH = POSITIVE.but("it bounds a ratio of probabilities from above", "3.0 is TRL's")
TRUST_THRESHOLD = POSITIVE.but("it is a mean log-ratio in nats per token", "0.5 is a usual value")


@dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """What bounds the weight old policy / sampler of the policy loss, and which completions are dropped.

    Raises:
        ConfigError: bounds that no ratio can lie between.

    Source: truncated importance sampling arXiv:1802.01561 (V-trace); the mask arXiv:2512.02556 (DeepSeek-V3.2)
    """

    mode: TrustMode | None = None
    """By token or by sequence, truncated or masked; None: no weight."""
    low: float | None = limited(None, TRUST_LOW)
    """Lower bound of the ratio old policy / sampler; None: none."""
    high: float | None = limited(3.0, TRUST_HIGH)
    """Upper bound of the ratio old policy / sampler; None: none. How often it binds is logged."""
    threshold: float | None = limited(None, TRUST_THRESHOLD)
    """Drop completions of negative advantage whose mean log(sampler/policy) exceeds this, in nats per token."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ConfigError(
                "the bounds of the ratio to the sampler cross",
                got=f"low={self.low:g}, high={self.high:g}",
                why="no ratio lies between them",
                fix="a lower bound below 1, an upper one above 1",
            )

    @property
    def is_set(self) -> bool:
        """Whether it does anything."""
        return self.mode is not None or self.threshold is not None


class Trusted(NamedTuple):
    """What a trust region leaves of a batch."""

    weights: TokenValues
    """Factor on each token's surrogate, detached. [B, T]"""
    kl_weights: TokenValues
    """The same for a KL in the advantage, which a mask leaves where it is, with the weight of its own token. [B, T]"""
    metrics: dict[str, Tensor]
    """Shares of tokens, of completions, and of the advantage's size, that were cut."""

    @classmethod
    def of(cls, batch: Batch, region: TrustRegion) -> Trusted:
        """The weights of a batch, which has its sampler's log-probabilities."""
        sampler = scored_by(batch, "sampler", user="a trust region", otherwise="leave it out").logprobs
        policy, mask, advantages = batch.policy_logprobs.detach(), batch.mask, batch.advantages
        old = policy if batch.old_logprobs is None else batch.old_logprobs.detach()
        ratio = masked_log_ratio(old, sampler, mask)
        weights, outside = torch.ones_like(ratio), torch.zeros_like(mask)
        masks = region.mode is not None and region.mode.endswith("mask")
        if region.mode is not None:
            log_w = ratio.sum(-1, keepdim=True).expand_as(ratio) if region.mode.startswith("sequence") else ratio
            low = -math.inf if not region.low else math.log(region.low)
            high = math.inf if region.high is None else math.log(region.high)
            outside = (log_w < low) | (log_w > high)
            bounded = log_w.clamp(low, high).exp()
            weights = torch.where(outside, 0.0, bounded) if masks else bounded
        kl_weights = ratio.exp() if masks else weights
        if region.threshold is not None:
            distance = masked_mean(log_ratio(sampler.detach(), policy), mask, -1)
            of_sequence = advantages if advantages.ndim == 1 else masked_mean(advantages, mask, -1)
            left = ((distance > region.threshold) & (of_sequence < 0))[:, None]
            outside, weights = outside | left, torch.where(left, 0.0, weights)
        size = per_token(advantages, weights).abs()
        total = masked_sum(size, mask)
        dropped = mask.any(-1) & ~((weights > 0) & mask).any(-1)
        metrics = {
            "sampler/tokens_cut": share_of(outside, mask),
            "sampler/sequences_cut": dropped.float().mean(),
            "sampler/advantage_cut": masked_sum(size, outside & mask) / total.clamp(min=torch.finfo(total.dtype).tiny),
        }
        return cls(weights, kl_weights, metrics)
