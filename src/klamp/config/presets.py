"""Presets: recipes by name, each with its KL and policy loss as a paper states them, or as a known formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from klamp.config.kl import KLConfig
from klamp.config.loss import LossConfig
from klamp.errors import ConfigError, check_name

_GROUP_MEAN = {"advantage_baseline": "mean"}
_K1_OVER_SEQUENCES = {"kl_estimator": "k1", "kl_horizon": "sequence"}


@dataclass(frozen=True, kw_only=True)
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
    "recommended": Preset(paper="docs/concepts"),
    "exact-objective": Preset(
        kl_fields={"beta": 0.01, "kl_placement": "reward", **_K1_OVER_SEQUENCES}, paper="docs/where-it-ends"
    ),
    # The same optimum with the KL in the loss; kl_off_policy='sequence' makes it exact for several updates per rollout.
    "exact-objective-loss": Preset(kl_fields={"beta": 0.01, "kl_horizon": "sequence"}, paper="docs/where-it-ends"),
    # The paper differentiates k3 itself; the gradient that this has is named here: forward.
    "grpo": Preset(
        kl_fields={"beta": 0.04, "kl_gradient": "forward"},
        loss_fields={"loss_type": "grpo", **_GROUP_MEAN},
        paper="DeepSeekMath, arXiv:2402.03300",
    ),
    "dr_grpo": Preset(
        kl_fields={"beta": 0.0},
        loss_fields={"loss_type": "dr_grpo", **_GROUP_MEAN},
        paper="Dr. GRPO, arXiv:2503.20783",
    ),
    "dapo": Preset(
        kl_fields={"beta": 0.0},
        loss_fields={"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, **_GROUP_MEAN},
        paper="DAPO, arXiv:2503.14476",
    ),
    "ppo": Preset(
        kl_fields={"beta": 0.02, "kl_placement": "reward", **_K1_OVER_SEQUENCES},
        loss_fields={"loss_type": "grpo", "scale_rewards": "none", **_GROUP_MEAN},
        paper="arXiv:1909.08593 and InstructGPT, arXiv:2203.02155",
    ),
    # The paper names neither beta, which varies with the domain, nor the threshold of the mask.
    "deepseek-v3.2": Preset(
        kl_fields={"beta": 0.001, "kl_off_policy": "token"},
        loss_fields={"loss_type": "grpo", "scale_rewards": "none", "off_policy_mask_threshold": 0.5, **_GROUP_MEAN},
        paper="DeepSeek-V3.2, arXiv:2512.02556",
    ),
    # Exact over sequences only if summed or over a fixed length; under the paper's means the cosine is about .95.
    "frpo": Preset(
        kl_fields={"beta": 0.01, "kl_placement": "advantage", **_K1_OVER_SEQUENCES},
        loss_fields={"loss_type": "grpo", **_GROUP_MEAN},
        paper="FRPO, arXiv:2601.10201",
    ),
    # The paper's reference is the previous policy (reference='periodic'); its ratio bounds hold for reward and KL.
    "rpg": Preset(
        kl_fields={"beta": 1e-4, "kl_off_policy": "token"},
        loss_fields={"loss_type": "dapo", "scale_rewards": "none", "epsilon_high": 0.28, **_GROUP_MEAN},
        paper="RPG, arXiv:2505.17508",
    ),
    "k1-as-loss": Preset(
        kl_fields={"beta": 0.01, "kl_estimator": "k1", "kl_gradient": "own"},
        loss_fields={"loss_type": "bnpo", **_GROUP_MEAN},
        paper="the from-scratch guide, as printed (docs/sources.md)",
    ),
    "k3-as-loss": Preset(
        kl_fields={"beta": 0.04, "kl_gradient": "own"},
        loss_fields={"loss_type": "dr_grpo", **_GROUP_MEAN},
        paper="the k3 bug report, as printed (docs/sources.md)",
    ),
}
"""Name -> recipe."""

NO_PENALTY: Mapping[str, str] = {
    "minus-k1": "kl_coef * (log ref - log policy) is minus k1: the loss falls as the policy leaves the reference",
    "ratio-weighted": "exp(delta) * delta weights by policy/ref, which is right for the reference's tokens alone",
}
"""Formulas that are passed around as a KL, and why no KL configuration stands for them."""


def find_preset(name: str) -> Preset:
    """The recipe of this name: its KL, its policy loss, its paper; errors as `preset`."""
    if str(name) in NO_PENALTY:
        fix = f"use preset('recommended'), or 'ppo' for a KL in the reward; `klamp explain {name}` shows the formula"
        raise ConfigError(f"{name} is no penalty on KL(policy||ref)", got=name, why=NO_PENALTY[name], fix=fix)
    check_name("preset", name, PRESETS)
    return PRESETS[name]


def preset(name: str) -> KLConfig:
    """The KL configuration of a recipe; `klamp.config.PRESETS` also holds its policy loss and its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
        ConfigError: a formula that is passed around as a KL and is no penalty on KL(policy||ref).
    """
    return find_preset(name).kl
