"""Presets: recipes by name, each with its KL and policy loss as a paper states them, or as a known formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from klamp.config.kl import KLConfig
from klamp.config.loss import LossConfig
from klamp.errors import check_name

_GROUP_MEAN = {"advantage_baseline": "mean"}
_K1_OVER_SEQUENCES = {"kl_estimator": "k1", "kl_horizon": "sequence"}


@dataclass(frozen=True)
class Preset:
    """A recipe: its KL, its policy loss, and where it comes from. Its parts are built, and warn, when asked for."""

    paper: str
    """The paper that states it."""
    kl_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Where the KL differs from the default."""
    loss_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Where the policy loss differs from the default."""

    @property
    def kl(self) -> KLConfig:
        """The KL term."""
        return KLConfig(**self.kl_fields)

    @property
    def loss(self) -> LossConfig:
        """The policy loss around it."""
        return LossConfig(**self.loss_fields)


PRESETS: Mapping[str, Preset] = {
    "recommended": Preset("docs/which-kl"),
    "exact-objective": Preset("docs/where-it-ends", {"beta": 0.01, "kl_placement": "reward", **_K1_OVER_SEQUENCES}),
    # The same optimum with the KL in the loss; kl_off_policy='sequence' makes it exact for several updates per rollout.
    "exact-objective-loss": Preset("docs/where-it-ends", {"beta": 0.01, "kl_horizon": "sequence"}),
    # The paper differentiates k3 itself; the gradient that this has is named here: forward.
    "grpo": Preset(
        "DeepSeekMath, arXiv:2402.03300", {"beta": 0.04, "kl_gradient": "forward"}, {"loss_type": "grpo", **_GROUP_MEAN}
    ),
    "dr_grpo": Preset("Dr. GRPO, arXiv:2503.20783", {"beta": 0.0}, {"loss_type": "dr_grpo", **_GROUP_MEAN}),
    "dapo": Preset("DAPO, arXiv:2503.14476", {"beta": 0.0}, {"loss_type": "dapo", "epsilon_high": 0.28, **_GROUP_MEAN}),
    "ppo": Preset(
        "arXiv:1909.08593 and InstructGPT, arXiv:2203.02155",
        {"beta": 0.02, "kl_placement": "reward", **_K1_OVER_SEQUENCES},
        {"loss_type": "grpo", "scale_rewards": "none", **_GROUP_MEAN},
    ),
    # The paper does not name beta, which varies with the domain, or the mask's threshold.
    "deepseek-v3.2": Preset(
        "DeepSeek-V3.2, arXiv:2512.02556",
        {"beta": 0.001, "kl_off_policy": "token"},
        {"loss_type": "grpo", "scale_rewards": "none", "off_policy_mask_threshold": 0.5, **_GROUP_MEAN},
    ),
    # Exact over sequences only if summed or over a fixed length; under the paper's means the cosine is about .95.
    "frpo": Preset(
        "FRPO, arXiv:2601.10201",
        {"beta": 0.01, "kl_placement": "advantage", **_K1_OVER_SEQUENCES},
        {"loss_type": "grpo", **_GROUP_MEAN},
    ),
    # The paper's reference is the previous policy (reference='periodic'); its ratio bounds hold for reward and KL.
    "rpg": Preset(
        "RPG, arXiv:2505.17508",
        {"beta": 1e-4, "kl_off_policy": "token"},
        {"loss_type": "dapo", "scale_rewards": "none", "epsilon_high": 0.28, **_GROUP_MEAN},
    ),
    "k1-as-loss": Preset(
        "the from-scratch guide, as printed (docs/sources.md)",
        {"beta": 0.01, "kl_estimator": "k1", "kl_gradient": "own"},
        {"loss_type": "bnpo", **_GROUP_MEAN},
    ),
    "k3-as-loss": Preset(
        "the k3 bug report, as printed (docs/sources.md)",
        {"beta": 0.04, "kl_gradient": "own"},
        {"loss_type": "dr_grpo", **_GROUP_MEAN},
    ),
}
"""Name -> recipe."""


def find_preset(name: str) -> Preset:
    """The recipe of this name: its KL, its policy loss, its paper; errors as `preset`."""
    check_name("preset", name, PRESETS)
    return PRESETS[name]


def preset(name: str) -> KLConfig:
    """The KL configuration of a recipe; `klamp.config.PRESETS` also holds its policy loss and its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
    """
    return find_preset(name).kl
