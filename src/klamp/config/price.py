"""What a beta costs: the reward that is given up for one nat of KL of a whole completion."""

from __future__ import annotations

from dataclasses import dataclass

from klamp.config.kl import KLConfig
from klamp.config.loss import LOSS_TYPES, LossConfig, divisor, kl_reduction
from klamp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Price:
    """The exchange rate between reward and KL that a configuration trains at.

    Attributes:
        per_completion: reward per nat of a whole completion; where advantages are divided by the group's standard
            deviation, per nat and per unit of that deviation.
        scaled: whether advantages are divided by it, so that no single number is the price.
        beta: the coefficient.
        length_ratio: the divisor of the policy loss over that of the KL; 1 where both are reduced alike.
        baseline_ratio: G / (G - 1) where a group's mean, own reward included, is the baseline; else 1.
    """

    per_completion: float
    scaled: bool
    beta: float
    length_ratio: float
    baseline_ratio: float

    def at(self, reward_std: float) -> float:
        """The price in a group whose rewards have this standard deviation, in reward per nat of a completion."""
        return self.per_completion * reward_std if self.scaled else self.per_completion


def price_of(
    kl: KLConfig, loss: LossConfig, *, group_size: int, mean_length: float, max_length: int, beta: float | None = None
) -> Price:
    """The price of one nat of KL of a whole completion, in reward.

    Equation: beta * D_policy / D_kl * G / (G - 1) * s, where D is what a reduction divides a completion's sum by (the
    mean length, the fixed length, or 1); G / (G - 1) for a baseline that is the group's mean, with the KL in the loss
    or the advantage; s the standard deviation of the group's rewards where advantages are divided by it (left to
    `Price.at`). A KL in the reward is divided by whatever divides the reward: its price is beta.

    The policy at which the expected update of an exact configuration is zero is ref * exp(reward / price):
    `klamp.verify.convergence` finds it.

    Args:
        kl: the KL term.
        loss: the policy loss.
        group_size: completions per prompt, G.
        mean_length: mean length of the completions, in tokens.
        max_length: longest completion, in tokens; the divisor of `fixed_length`.
        beta: the coefficient in force; None: the configuration's.

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
    coefficient = kl.beta if beta is None else beta
    inside = kl.kl_placement == "reward"
    own, other = (
        divisor(reduction, mean_length=mean_length, max_length=max_length)
        for reduction in (LOSS_TYPES[loss.loss_type].reduction, kl_reduction(kl, loss))
    )
    length_ratio = own / other
    centred = not inside and loss.advantage_baseline == "mean"
    baseline_ratio = group_size / (group_size - 1) if centred else 1.0
    return Price(
        per_completion=coefficient * length_ratio * baseline_ratio,
        scaled=not inside and loss.scale == "std",
        beta=coefficient,
        length_ratio=length_ratio,
        baseline_ratio=baseline_ratio,
    )
