"""Recipes by name: the KL term and the policy loss as their paper states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from klamp.config.kl import KLConfig
from klamp.config.loss import LossConfig
from klamp.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe: its KL, its policy loss, and where it comes from."""

    kl: KLConfig
    """The KL term."""
    loss: LossConfig
    """The policy loss around it."""
    paper: str
    """The paper that states it."""
    remark: str
    """What to know before using it."""


PRESETS: Mapping[str, Preset] = {
    "recommended": Preset(
        kl=KLConfig(),
        loss=LossConfig(),
        paper="docs/concepts",
        remark="value k3, gradient of KL(policy||ref), in the loss",
    ),
    "grpo": Preset(
        # The paper differentiates k3 itself; the gradient that this has is named here: forward.
        kl=KLConfig(beta=0.04, kl_estimator="k3", kl_gradient="forward"),
        loss=LossConfig(loss_type="grpo", epsilon=0.2),
        paper="DeepSeekMath, arXiv:2402.03300",
        remark="its k3 loss follows the gradient of KL(ref||policy)",
    ),
    "dr_grpo": Preset(
        kl=KLConfig(beta=0.0),
        loss=LossConfig(loss_type="dr_grpo"),
        paper="Dr. GRPO, arXiv:2503.20783",
        remark="no KL; meant for rule-based verifiers",
    ),
    "dapo": Preset(
        kl=KLConfig(beta=0.0),
        loss=LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
        paper="DAPO, arXiv:2503.14476",
        remark="no KL; token mean, wider upper ratio bound",
    ),
    "ppo": Preset(
        kl=KLConfig(beta=0.02, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"),
        loss=LossConfig(loss_type="grpo", scale_rewards="none", epsilon=0.2),
        paper="arXiv:1909.08593 and InstructGPT, arXiv:2203.02155",
        remark="k1 summed over the sequence, taken from the reward; advantages must not be divided by the group's std",
    ),
    "deepseek-v3.2": Preset(
        kl=KLConfig(beta=0.001, kl_estimator="k3", kl_gradient="reverse", kl_off_policy="token"),
        loss=LossConfig(loss_type="grpo"),
        paper="DeepSeek-V3.2, arXiv:2512.02556",
        remark="k3 weighted by the token ratio: gradient of KL(policy||ref); the paper ties beta to the domain",
    ),
    "frpo": Preset(
        kl=KLConfig(beta=0.001, kl_estimator="k1", kl_gradient="reverse", kl_horizon="sequence"),
        loss=LossConfig(loss_type="grpo"),
        paper="FRPO, arXiv:2601.10201",
        remark="k1 reward-to-go: the exact gradient over sequences",
    ),
    "rpg": Preset(
        kl=KLConfig(beta=0.001, kl_estimator="k3", kl_gradient="reverse", kl_off_policy="token"),
        loss=LossConfig(loss_type="grpo", surrogate="score_function"),
        paper="RPG, arXiv:2505.17508",
        remark="off-policy corrected reverse KL per token",
    ),
}


def preset(name: str) -> KLConfig:
    """The KL configuration of a recipe; `klamp.config.PRESETS` also holds its policy loss and its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name].kl
