"""Presets: recipes by name, each with its KL and policy loss as a paper states them, or as a known formula."""

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
    """What to know before using the recipe."""


class _Recipes(Mapping[str, Preset]):
    """Name -> recipe; each recipe is built only when it is asked for, since building some of them warns."""

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
            remark="value k3, gradient of KL(policy||ref) token by token, in the loss; nothing is divided by a length "
            "that depends on the tokens",
        ),
        "exact-objective": lambda: Preset(
            kl=KLConfig(beta=0.01, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"),
            loss=LossConfig(),
            paper="docs/where-it-ends",
            remark="ends at the optimum of E[reward] - beta KL(policy||ref); beta is the price of a nat",
        ),
        "exact-objective-loss": lambda: Preset(
            kl=KLConfig(beta=0.01, kl_horizon="sequence"),
            loss=LossConfig(),
            paper="docs/where-it-ends",
            remark="the same optimum with the KL in the loss: k3 over the sequence. Add kl_off_policy='sequence' for "
            "several updates per rollout",
        ),
        "grpo": lambda: Preset(
            # The paper differentiates k3 itself; the gradient that this has is named here: forward.
            kl=KLConfig(beta=0.04, kl_estimator="k3", kl_gradient="forward"),
            loss=LossConfig(advantage_baseline="mean", loss_type="grpo", epsilon=0.2),
            paper="DeepSeekMath, arXiv:2402.03300",
            remark="its k3 loss follows the gradient of KL(ref||policy) at each position",
        ),
        "dr_grpo": lambda: Preset(
            kl=KLConfig(beta=0.0),
            loss=LossConfig(advantage_baseline="mean", loss_type="dr_grpo"),
            paper="Dr. GRPO, arXiv:2503.20783",
            remark="no KL; meant for rule-based verifiers",
        ),
        "dapo": lambda: Preset(
            kl=KLConfig(beta=0.0),
            loss=LossConfig(advantage_baseline="mean", loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
            paper="DAPO, arXiv:2503.14476",
            remark="no KL; token mean, wider upper ratio bound",
        ),
        "ppo": lambda: Preset(
            kl=KLConfig(beta=0.02, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"),
            loss=LossConfig(advantage_baseline="mean", loss_type="grpo", scale_rewards="none", epsilon=0.2),
            paper="arXiv:1909.08593 and InstructGPT, arXiv:2203.02155",
            remark="k1 summed over the sequence, taken from the reward; advantages must not be divided by the group's "
            "std",
        ),
        "deepseek-v3.2": lambda: Preset(
            kl=KLConfig(beta=0.001, kl_estimator="k3", kl_gradient="reverse", kl_off_policy="token"),
            loss=LossConfig(
                advantage_baseline="mean", loss_type="grpo", scale_rewards="none", off_policy_mask_threshold=0.5
            ),
            paper="DeepSeek-V3.2, arXiv:2512.02556",
            remark="k3 weighted by the token ratio: at each position the gradient of KL(policy||ref), also off-policy; "
            "advantages are not divided by the std; bad completions that the policy has left are masked. The paper "
            "names neither beta (it varies with the domain) nor the mask's threshold",
        ),
        "frpo": lambda: Preset(
            kl=KLConfig(beta=0.01, kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence"),
            loss=LossConfig(advantage_baseline="mean", loss_type="grpo"),
            paper="FRPO, arXiv:2601.10201",
            remark="k1 reward-to-go, taken from the advantage after its normalisation: the exact gradient over "
            "sequences if summed or over a fixed length (loss_type='dr_grpo'); under the sequence means here its "
            "cosine with that is about .95",
        ),
        "rpg": lambda: Preset(
            kl=KLConfig(beta=1e-4, kl_estimator="k3", kl_gradient="reverse", kl_off_policy="token"),
            loss=LossConfig(
                advantage_baseline="mean", loss_type="dapo", scale_rewards="none", epsilon=0.2, epsilon_high=0.28
            ),
            paper="RPG, arXiv:2505.17508",
            remark="the unnormalised reverse KL (k3), corrected off-policy. The paper's reference is the previous "
            "policy (reference='periodic'), and its ratio bounds hold for reward and KL together",
        ),
        "k1-as-loss": lambda: Preset(
            kl=KLConfig(beta=0.01, kl_estimator="k1", kl_gradient="own"),
            loss=LossConfig(advantage_baseline="mean", loss_type="bnpo"),
            paper="the from-scratch guide, as printed (docs/sources.md)",
            remark="k1 as a loss: expected gradient zero, summed over tokens; see klamp explain k1-as-loss",
        ),
        "k3-as-loss": lambda: Preset(
            kl=KLConfig(beta=0.04, kl_estimator="k3", kl_gradient="own"),
            loss=LossConfig(advantage_baseline="mean", loss_type="dr_grpo"),
            paper="the k3 bug report, as printed (docs/sources.md)",
            remark="k3 as a loss: gradient of KL(ref||policy); see klamp explain k3-as-loss",
        ),
    }
)
"""Name -> recipe."""


def _not_a_kl(name: str) -> list[Refusal]:
    """Formulas that are passed around as a KL and that no KL configuration stands for."""
    return [
        Refusal(
            name == "minus-k1",
            "minus k1 is no penalty",
            got=repr(name),
            why="kl_coef * (log ref - log policy) is minus k1: the further the policy leaves the reference, the lower "
            "the loss",
            fix="use preset('recommended'), or kl_estimator='k1' with kl_gradient='reverse'; `klamp explain minus-k1` "
            "shows what the formula does",
        ),
        Refusal(
            name == "ratio-weighted",
            "k1 weighted by policy/ref is not KL(policy||ref)",
            got=repr(name),
            why="exp(delta) * delta weights by policy/ref, which is right for tokens of the reference, not of the "
            "policy",
            fix="use preset('ppo') for a KL in the reward, or kl_estimator='exact'; `klamp explain ratio-weighted` "
            "shows what the formula does",
        ),
    ]


def find_preset(name: str) -> Preset:
    """The recipe of this name: its KL, its policy loss, its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
        ConfigError: a formula that is passed around as a KL and is no penalty on KL(policy||ref).
    """
    text = str(name)
    refuse(_not_a_kl(text))
    if text not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[text]


def preset(name: str) -> KLConfig:
    """The KL configuration of a recipe; `klamp.config.PRESETS` also holds its policy loss and its paper.

    Raises:
        UnknownNameError: an unknown recipe; names the nearest.
        ConfigError: a formula that is passed around as a KL and is no penalty on KL(policy||ref).
    """
    return find_preset(name).kl
