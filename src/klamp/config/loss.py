"""`LossConfig`, the policy loss that a KL is added to, and the objective made from both."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.config.kl import KLConfig
from klamp.core.advantages import Baseline, Scale
from klamp.core.arguments import AT_LEAST_1, check_instance, check_number
from klamp.core.fields import check_fields
from klamp.core.objective import Objective, SurrogateName
from klamp.core.surrogates import CLIP_HIGH, CLIP_LOW
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KLWarning

LossType: TypeAlias = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, kw_only=True)
class _LossRow:
    reduction: Reduction
    scale: Scale


LOSS_TYPES: Mapping[LossType, _LossRow] = {
    "dapo": _LossRow(reduction="token_mean", scale="std"),
    "grpo": _LossRow(reduction="sequence_mean", scale="std"),
    "bnpo": _LossRow(reduction="token_mean", scale="std"),
    "dr_grpo": _LossRow(reduction="fixed_length", scale="none"),
}
"""What each loss type fixes: how tokens become a number, and whether advantages are divided by the group's std."""

TRL_LOSS_TYPES: Mapping[str, Reduction | None] = {
    **{name: row.reduction for name, row in LOSS_TYPES.items()},
    "bnpo": None,
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "vespo": "token_mean",
    "luspo": "sequence_sum",
}
"""How TRL's loss types make tokens a number; None: no word for it (bnpo: the token mean of each micro-batch)."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss that the KL is added to: surrogate, ratio bounds, average over tokens, advantages.

    Equation: R[surrogate_t], R by `loss_type` (see `LOSS_TYPES`, `reduce_tokens`), surrogate as in `ppo_clip`, `cispo`,
    `score_function`. The fields are named as in TRL.

    `bnpo` and `dapo` are both token means; klamp takes the mean over the whole batch of an optimizer step
    (micro-batches and processes add up exactly), so that here they are the same. TRL's `bnpo`
    divides each micro-batch by itself.

    The defaults are those under which klamp's sentences about gradients hold without an "about": a fixed length divides
    every completion alike, and the mean of the others is a baseline that shrinks nothing. The papers' own are presets.

    Raises:
        UnknownNameError, ConfigError: unknown or impossible choices.

    Source: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783 (dr_grpo), DAPO arXiv:2503.14476 (dapo)
    """

    loss_type: LossType = "dr_grpo"
    """Average: dr_grpo (fixed length, advantages not scaled), grpo (sequence means), bnpo and dapo (token mean)."""
    surrogate: SurrogateName = Objective.surrogate
    """The policy loss of a token: ppo_clip, cispo or score_function."""
    epsilon: float = Objective.clip_low
    """The ratio is clipped below 1 - epsilon; cispo's paper has no lower bound, which is epsilon 1."""
    epsilon_high: float | None = None
    """The ratio is clipped above 1 + epsilon_high; None: the same as epsilon."""
    scale_rewards: Scale | None = None
    """Divide advantages by the group's standard deviation (std) or not (none); None: what the loss type says."""
    advantage_baseline: Baseline = "leave_one_out"
    """What rewards are compared with: leave_one_out (mean of the group's others), or mean (of all, as in GRPO)."""

    def __post_init__(self) -> None:
        check_fields(self, {"epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH})
        for name in ("epsilon", "epsilon_high") if self.surrogate == "score_function" else ():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                text = f"{name}={getattr(self, name)!r} has no effect: it needs surrogate='ppo_clip' or 'cispo'."
                warnings.warn(text, KLWarning, stacklevel=3)

    @property
    def clip_high(self) -> float:
        """The upper bound of the ratio in force, as its distance from 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def scale(self) -> Scale:
        """The scaling of advantages in force."""
        return self.scale_rewards or LOSS_TYPES[self.loss_type].scale


def kl_reduction(kl: KLConfig, loss: LossConfig) -> Reduction:
    """The reduction of the KL: `kl_normalizer` where it is in the loss and has one, else the policy loss's."""
    own = kl.kl_normalizer if kl.kl_placement == "loss" else None
    return own or LOSS_TYPES[loss.loss_type].reduction


def divisor(reduction: Reduction, *, mean_length: float, max_length: float | None = None) -> float:
    """What a reduction divides the sum over a completion's tokens by, before it takes the mean over completions.

    Args:
        reduction: which one.
        mean_length: mean length of the completions, in tokens.
        max_length: longest completion in tokens, the divisor of `fixed_length`; None: the mean.
    """
    divisors: Mapping[Reduction, float] = {
        "token_mean": mean_length,
        "sequence_mean": mean_length,
        "sequence_sum": 1.0,
        "fixed_length": float(mean_length if max_length is None else max_length),
    }
    return divisors[reduction]


def build_objective(kl: KLConfig, loss: LossConfig, *, max_length: int) -> Objective:
    """The objective of `grpo_loss` that a KL and a policy loss describe together; its beta in reward per nat.

    Equation: R[surrogate_t] + beta R_kl[penalty_t], see `grpo_loss`; R of `loss`, R_kl that of `kl.kl_normalizer` or R.

    Args:
        kl: the KL term; its beta is the starting one.
        loss: the policy loss.
        max_length: longest completion in tokens, the divisor of dr_grpo.

    Raises:
        ConfigError: the KL in the reward together with advantages divided by the group's std; arguments of other types.
    """
    check_instance("kl", kl, KLConfig)
    check_instance("loss", loss, LossConfig)
    check_number("max_length", max_length, AT_LEAST_1.but("a completion has tokens", "pass max_length"), whole=True)
    used = kl.beta > 0 or kl.controller_name != "fixed"
    if used and kl.kl_placement == "reward" and loss.scale == "std":
        raise ConfigError(
            "the KL in the reward cannot be combined with advantages divided by the group's std",
            got=f"kl_placement='reward', loss_type={loss.loss_type!r}, scale_rewards='std'",
            why="in a group whose rewards are all equal the division cancels beta: the update is the same for every "
            "beta > 0",
            fix="set scale_rewards='none', or kl_placement='advantage' (the KL enters after the division)",
        )
    return Objective(
        surrogate=loss.surrogate,
        clip_low=loss.epsilon,
        clip_high=loss.clip_high,
        reduction=LOSS_TYPES[loss.loss_type].reduction,
        max_length=max_length,
        beta=kl.beta,
        kl=kl.build_term(),
    )
