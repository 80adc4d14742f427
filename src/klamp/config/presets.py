"""Recipes by name: the KL term and the policy loss as their paper states them, or as a source document prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from klamp.config.kl import KLConfig
from klamp.config.loss import LossConfig
from klamp.errors import Refusal, refuse, unknown_name


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


class _Recipes(Mapping[str, Preset]):
    """Name -> recipe, built when it is asked for: some of them warn of what they do, and only their users are told."""

    def __init__(self, recipes: Mapping[str, Callable[[], Preset]]) -> None:
        self._recipes = recipes

    def __getitem__(self, name: str) -> Preset:
        return self._recipes[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)

    def __contains__(self, name: object) -> bool:
        return name in self._recipes


PRESETS: Mapping[str, Preset] = _Recipes(
    {
        "recommended": lambda: Preset(
            kl=KLConfig(),
            loss=LossConfig(),
            paper="docs/concepts",
            remark="value k3, gradient of KL(policy||ref), in the loss",
        ),
        "grpo": lambda: Preset(
            # The paper differentiates k3 itself; the gradient that this has is named here: forward.
            kl=KLConfig(beta=0.04, kl_estimator="k3", kl_gradient="forward"),
            loss=LossConfig(loss_type="grpo", epsilon=0.2),
            paper="DeepSeekMath, arXiv:2402.03300",
            remark="its k3 loss follows the gradient of KL(ref||policy)",
        ),
        "dr_grpo": lambda: Preset(
            kl=KLConfig(beta=0.0),
            loss=LossConfig(loss_type="dr_grpo"),
            paper="Dr. GRPO, arXiv:2503.20783",
            remark="no KL; meant for rule-based verifiers",
        ),
        "dapo": lambda: Preset(
            kl=KLConfig(beta=0.0),
            loss=LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
            paper="DAPO, arXiv:2503.14476",
            remark="no KL; token mean, wider upper ratio bound",
        ),
        "ppo": lambda: Preset(
            kl=KLConfig(beta=0.02, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"),
            loss=LossConfig(loss_type="grpo", scale_rewards="none", epsilon=0.2),
            paper="arXiv:1909.08593 and InstructGPT, arXiv:2203.02155",
            remark="k1 summed over the sequence, taken from the reward; advantages must not be divided by the group's "
            "std",
        ),
        "deepseek-v3.2": lambda: Preset(
            kl=KLConfig(beta=0.001, kl_estimator="k3", kl_gradient="reverse", kl_off_policy="token"),
            loss=LossConfig(loss_type="grpo", scale_rewards="none"),
            paper="DeepSeek-V3.2, arXiv:2512.02556",
            remark="k3 weighted by the token ratio: gradient of KL(policy||ref); advantages are not divided by the "
            "std. The paper names no beta (it varies with the domain), and also masks off-policy sequences, which "
            "this does not",
        ),
        "frpo": lambda: Preset(
            kl=KLConfig(beta=0.01, kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence"),
            loss=LossConfig(loss_type="grpo"),
            paper="FRPO, arXiv:2601.10201",
            remark="k1 reward-to-go, taken from the advantage after its normalisation: the exact gradient over "
            "sequences",
        ),
        "rpg": lambda: Preset(
            kl=KLConfig(beta=1e-4, kl_estimator="k3", kl_gradient="reverse", kl_off_policy="token"),
            loss=LossConfig(loss_type="dapo", scale_rewards="none", epsilon=0.2, epsilon_high=0.28),
            paper="RPG, arXiv:2505.17508",
            remark="the unnormalised reverse KL (k3), corrected off-policy. The paper's reference is the previous "
            "policy (reference='periodic'), and its ratio bounds hold for reward and KL together",
        ),
        "source-001": lambda: Preset(
            kl=KLConfig(beta=0.01, kl_estimator="k1", kl_gradient="own"),
            loss=LossConfig(loss_type="bnpo"),
            paper="source document 001, as printed",
            remark="k1 as a loss: expected gradient zero; see klamp explain source-001",
        ),
        "source-004": lambda: Preset(
            kl=KLConfig(beta=0.04, kl_estimator="k3", kl_gradient="own"),
            loss=LossConfig(loss_type="dr_grpo"),
            paper="source document 004, as printed",
            remark="k3 as a loss: gradient of KL(ref||policy); see klamp explain source-004",
        ),
    }
)
"""Name -> recipe."""


def _not_a_kl(name: str) -> list[Refusal]:
    """Printed formulas that no KL configuration stands for."""
    return [
        Refusal(
            name == "source-002",
            "the formula that source document 002 prints is no penalty",
            got=repr(name),
            why="kl_coef * (log ref - log policy) is minus k1: the further the policy leaves the reference, the lower "
            "the loss",
            fix="use preset('recommended'), or kl_estimator='k1' with kl_gradient='reverse'; `klamp explain "
            "source-002` shows what the printed form does",
        ),
        Refusal(
            name == "source-003",
            "the formula that source document 003 prints is not KL(policy||ref)",
            got=repr(name),
            why="exp(delta) * delta weights by policy/ref, which is right for tokens of the reference, not of the "
            "policy",
            fix="use preset('ppo') for a KL in the reward, or kl_estimator='exact' as in its hands-on example; `klamp "
            "explain source-003` shows what the printed form does",
        ),
    ]


def find_preset(name: str) -> Preset:
    """The recipe of this name: its KL, its policy loss, its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
        ConfigError: a printed formula that is no penalty on KL(policy||ref).
    """
    refuse(_not_a_kl(name))
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


def preset(name: str) -> KLConfig:
    """The KL configuration of a recipe; `klamp.config.PRESETS` also holds its policy loss and its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
        ConfigError: a printed formula that is no penalty on KL(policy||ref).
    """
    return find_preset(name).kl
