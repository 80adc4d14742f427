"""What a beta costs: the reward that is given up for one nat of KL of a whole completion."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from klamp.config.kl import KLConfig
from klamp.config.loss import LOSS_TYPES, LossConfig, divisor, kl_reduction
from klamp.core.advantages import Baseline, Scale
from klamp.core.term import Placement
from klamp.core.types import Reduction
from klamp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Price:
    """The exchange rate between reward and KL that a configuration trains at.

    Attributes:
        beta: the coefficient.
        length_ratio: the divisor of the policy loss over that of the KL; 1 where both are reduced alike.
        baseline_ratio: G / (G - 1) where a group's mean, own reward included, is the baseline; else 1.
        scaled: whether advantages are divided by the group's standard deviation, so that no single number is the price.
    """

    beta: float
    length_ratio: float = 1.0
    baseline_ratio: float = 1.0
    scaled: bool = False

    @property
    def per_completion(self) -> float:
        """Reward per nat of a whole completion; where advantages are scaled, per unit of the group's deviation too."""
        return self.beta * self.length_ratio * self.baseline_ratio

    def per_token(self, length: float) -> float:
        """The same in the unit of the logged mean: reward per nat per token, for completions of so many tokens."""
        return self.per_completion * length

    def at(self, reward_std: float) -> float:
        """The price in a group whose rewards have this standard deviation, in reward per nat of a completion."""
        return self.per_completion * reward_std if self.scaled else self.per_completion


def price_of(
    beta: float,
    *,
    placement: Placement,
    baseline: Baseline,
    scale: Scale,
    group_size: int,
    policy: Reduction | None = None,
    kl: Reduction | None = None,
    mean_length: float = 1.0,
    max_length: int = 1,
) -> Price:
    """The price of one nat of KL of a whole completion, in reward.

    Equation: beta * D_policy / D_kl * G / (G - 1) * s, where D is what a reduction divides a completion's sum by (the
    mean length, the fixed length, or 1); G / (G - 1) for a baseline that is the group's mean, with the KL in the loss
    or the advantage; s the standard deviation of the group's rewards where advantages are divided by it (left to
    `Price.at`). A KL in the reward is divided by whatever divides the reward: its price is beta.

    The policy at which the expected update of an exact configuration is zero is ref * exp(reward / price):
    `klamp.verify.convergence` finds it.

    Args:
        beta: the coefficient in force.
        placement: where the KL enters.
        baseline: of the advantages.
        scale: of the advantages.
        group_size: completions per prompt, G.
        policy: how the tokens of the policy loss become a number; None: as those of the KL do.
        kl: how the KL's do; None: as those of the policy loss.
        mean_length: mean length of the completions, in tokens; without effect where both are reduced alike.
        max_length: longest completion, in tokens; the divisor of `fixed_length`, likewise.

    Raises:
        ConfigError: a group of one, or lengths below one token.
    """
    if group_size < 2 or mean_length <= 0 or max_length < 1:
        raise ConfigError(
            "a price needs a group and lengths",
            got=f"group_size={group_size}, mean_length={mean_length:g}, max_length={max_length}",
            why="the baseline is taken over the group, and a mean is taken over tokens",
            fix="group_size >= 2, lengths >= 1",
        )
    inside = placement == "reward"
    ratio = 1.0
    if policy is not None and kl is not None and policy != kl:
        own, of_kl = (divisor(each, mean_length=mean_length, max_length=max_length) for each in (policy, kl))
        ratio = own / of_kl
    centred = not inside and baseline == "mean"
    return Price(
        beta=beta,
        length_ratio=ratio,
        baseline_ratio=group_size / (group_size - 1) if centred else 1.0,
        scaled=not inside and scale == "std",
    )


def configured_price(
    kl: KLConfig, loss: LossConfig, *, group_size: int, mean_length: float, max_length: int, beta: float | None = None
) -> Price:
    """The price that a configuration trains at; see `price_of`.

    Args:
        kl: the KL term.
        loss: the policy loss.
        group_size: completions per prompt.
        mean_length: mean length of the completions, in tokens.
        max_length: longest completion, in tokens.
        beta: the coefficient in force; None: the configuration's.

    Raises:
        ConfigError: a group of one, or lengths below one token.
    """
    return price_of(
        kl.beta if beta is None else beta,
        placement=kl.kl_placement,
        policy=LOSS_TYPES[loss.loss_type].reduction,
        kl=kl_reduction(kl, loss),
        baseline=loss.advantage_baseline,
        scale=loss.scale,
        group_size=group_size,
        mean_length=mean_length,
        max_length=max_length,
    )


def price_at_distance(rewards: Tensor, kl: float) -> float:
    """The price at which the best policy lies `kl` nats per completion from the one that earned these rewards.

    Equation: the p for which the mean over groups of KL(q_p || uniform) is kl, with q_p proportional to exp(reward / p)
    over the completions of a group. To second order p = s / sqrt(2 kl), s^2 the mean variance within groups; this one
    also sees groups without a spread, and rewards that cannot rise any further.

    Args:
        rewards: [n, G], a group of completions in each row.
        kl: in nats per completion, above 0.

    Returns:
        In reward per nat of a completion; 0.0 where no price leads so far from the completions that are there.
    """
    rewards = rewards.double().cpu()  # every step of the search reads a number
    rewards = rewards - rewards.amax(-1, keepdim=True)
    size = float(rewards.abs().max())
    low, high = -30.0, 30.0  # log of 1 / price, in units of the largest difference
    if size == 0 or _distance(rewards / size, math.exp(high)) <= kl:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _distance(rewards / size, math.exp(middle)) < kl else (low, middle)
    return size / math.exp(high)


def _distance(rewards: Tensor, tilt: float) -> float:
    """KL(q || uniform) with q proportional to exp(tilt * reward), mean over groups, in nats."""
    logprobs = (tilt * rewards).log_softmax(-1)
    return float((logprobs.exp() * (logprobs + math.log(rewards.shape[-1]))).sum(-1).mean())


def spread_of_group(reward_std: float, saturated: float) -> float | None:
    """The mean standard deviation of the rewards in groups that are not saturated; None where all are.

    Args:
        reward_std: mean over all groups, in which the saturated ones are 0.
        saturated: share of the groups whose rewards are all equal.
    """
    return reward_std / (1 - saturated) if saturated < 1 else None


def spreads_of_right_or_wrong(group_size: int) -> tuple[float, float]:
    """The least and the largest standard deviation of a group of rewards 0 and 1 that are not all equal.

    Equation: sqrt(k (G - k) / (G (G - 1))), k = 1 and k = G / 2.
    """
    pairs = group_size * (group_size - 1)
    least, most = (math.sqrt(k * (group_size - k) / pairs) for k in (1, group_size // 2))
    return least, most
