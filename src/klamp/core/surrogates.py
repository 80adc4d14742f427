"""The policy losses, per token, each to be minimised: its gradient raises the probability of good tokens.

r = policy / old = exp(log policy - log old), A = advantage, sg = stop-gradient. All take [B, T] log-probabilities and
advantages [B] or [B, T], and return [B, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, FROM_0_TO_1, check_number
from klamp.core.masking import upcast
from klamp.core.types import Advantages, LogProbs, TokenValues


def per_token(advantages: Advantages, like: TokenValues) -> TokenValues:
    """The advantages as [B, T]: an advantage of a whole sequence is repeated for each of its tokens."""
    advantages = upcast(advantages)
    return (advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages).expand_as(like)


def importance_ratio(policy_logprobs: LogProbs, old_logprobs: LogProbs) -> TokenValues:
    """The ratio r = exp(log policy - log old) of each token, with the old policy detached."""
    return (upcast(policy_logprobs) - upcast(old_logprobs.detach())).exp()


_BOUNDS = (
    "it is a distance from 1: the ratio is clipped to [1 - clip_low, 1 + clip_high]",
    "use values like 0.2 (and 0.28 above, as DAPO does)",
)
CLIP_LOW, CLIP_HIGH = FROM_0_TO_1.but(*_BOUNDS), AT_LEAST_0.but(*_BOUNDS)
"""Which ratio bounds below and above 1 there are."""


def check_clip_range(clip_low: float, clip_high: float) -> None:
    """Refuse ratio bounds that are no distances from 1.

    Raises:
        ConfigError: clip_low outside [0, 1], or clip_high negative.
    """
    check_number("clip_low", clip_low, CLIP_LOW)
    check_number("clip_high", clip_high, CLIP_HIGH)


def ppo_clip(
    policy_logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenValues:
    """The clipped surrogate of PPO and GRPO, per token, to be minimised.

    Equation: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Sampler: the old policy.
    Gradient: -r A grad log policy inside the bounds, 0 where the ratio has already moved past them in the direction
    of the advantage.

    Raises:
        ConfigError: bounds that are not distances from 1.

    Source: PPO arXiv:1707.06347; separate bounds DAPO arXiv:2503.14476
    """
    check_clip_range(clip_low, clip_high)
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
    """The clipped importance-weight loss of CISPO, per token, to be minimised.

    Equation: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy.

    Sampler: the old policy.
    Gradient: -clip(r) A grad log policy: every token keeps a gradient, the weight is bounded. The paper has no lower
    bound, which is clip_low = 1; LossConfig's epsilon of 0.2 cuts weights below 0.8.

    Raises:
        ConfigError: bounds that are not distances from 1.

    Source: MiniMax-M1 arXiv:2506.13585
    """
    check_clip_range(clip_low, clip_high)
    ratio = importance_ratio(policy_logprobs, old_logprobs).detach()
    a = per_token(advantages, ratio)
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * a * upcast(policy_logprobs)


def score_function(policy_logprobs: LogProbs, old_logprobs: LogProbs, advantages: Advantages) -> TokenValues:
    """The plain score-function loss (REINFORCE), per token, to be minimised.

    Equation: -A log policy. The old log-probabilities are not used.

    Sampler: the policy itself; off-policy it is biased.
    Gradient: -A grad log policy.
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
