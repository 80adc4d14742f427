"""`LossConfig`, the policy loss; the objective made from it and a KL; what a beta costs: the reward for one nat."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from klamp.config import anchor
from klamp.config.beyond import baseline_refusal, beyond_cautions, check_beyond
from klamp.config.fields import HostLimit, Need, like, one_of, setting, without_effect
from klamp.config.kl import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.advantages import Baseline, Scale
from klamp.core.arguments import AT_LEAST_1, check_fields, check_instance, check_number
from klamp.core.objective import Objective, SurrogateName
from klamp.core.surrogates import CLIP_HIGH, DPPOMask, Rejection, TrustMode, TrustRegion
from klamp.core.term import Placement, Weighted
from klamp.core.types import Direction, Reduction
from klamp.errors import ConfigError, KLWarning, refuse

LossType: TypeAlias = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


class _LossRow(NamedTuple):
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

A_RATIO = one_of("surrogate", "ppo_clip", "cispo")
A_MODE = Need("vllm_importance_sampling_mode", lambda c: c.vllm_importance_sampling_mode is not None)
A_REJECTION = Need("rollout_rs", lambda c: c.rollout_rs is not None)
A_DPPO = Need("dppo_mask", lambda c: c.dppo_mask is not None)
WHOLE_ROWS = HostLimit(
    hosts=("klamp train", "trl", "tinker"),
    why="it needs the sampler's probabilities of the whole vocabulary, and the host has the sampled tokens' only",
    fix="use 'seq_max_k3', which drops other completions; in your own loop grpo_loss takes the exact KL",
    values=("seq_max_exact",),
)
MASKS = ("rollout_rs", "rollout_rs_threshold", "dppo_mask", "dppo_mask_low", "dppo_mask_high")
"""The fields of a trust region that TRL does not have, named as in verl or prime-rl."""
TRUST: Mapping[str, str] = {
    "vllm_importance_sampling_mode": "mode",
    "vllm_importance_sampling_clip_min": "low",
    "vllm_importance_sampling_clip_max": "high",
    "off_policy_mask_threshold": "threshold",
    **{name: name for name in MASKS},
}
"""Field of `LossConfig`, named as in TRL where it has it -> field of `TrustRegion`."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss that the KL is added to: surrogate, ratio bounds, average over tokens, advantages.

    Equation: R[surrogate_t], R by `loss_type` (see `LOSS_TYPES`, `reduce_tokens`), surrogate as in `ppo_clip`, `cispo`,
    `score_function`. The fields are named as in TRL. `bnpo` and `dapo` are both the token mean over the whole batch of
    an optimizer step; TRL's `bnpo` divides each micro-batch by its own tokens.

    By default gradients are exact: a fixed length divides every completion alike, and the mean of the others is a
    baseline that shrinks nothing. The papers' own choices are presets.

    Raises:
        UnknownNameError, ConfigError: unknown or impossible choices.

    Source: GRPO arXiv:2402.03300, Dr. GRPO arXiv:2503.20783 (dr_grpo), DAPO arXiv:2503.14476 (dapo)
    """

    loss_type: LossType = "dr_grpo"
    """Average: dr_grpo (fixed length, advantages not scaled), grpo (sequence means), bnpo and dapo (token mean)."""
    surrogate: SurrogateName = Objective.surrogate
    """The policy loss of a token: ppo_clip, cispo or score_function."""
    epsilon: float = like(Objective, "clip_low", needs=(A_RATIO,))
    """The ratio is clipped below 1 - epsilon; cispo's paper has no lower bound, which is epsilon 1."""
    epsilon_high: float | None = setting(None, CLIP_HIGH, needs=(A_RATIO,))
    """The ratio is clipped above 1 + epsilon_high; None: the same as epsilon."""
    scale_rewards: Scale | None = setting(None, ignored_by=anchor.TINKER)
    """Divide advantages by the group's standard deviation (std) or not (none); None: what the loss type says."""
    vllm_importance_sampling_mode: TrustMode | None = setting(None, ignored_by=anchor.TINKER)
    """Weigh the loss by old policy / sampler: token_truncate, token_mask, sequence_truncate or sequence_mask; None: not
    (in backend trl, as TRL does by default)."""
    vllm_importance_sampling_clip_max: float | None = like(TrustRegion, "high", needs=(A_MODE,))
    vllm_importance_sampling_clip_min: float | None = like(TrustRegion, "low", needs=(A_MODE,))
    off_policy_mask_threshold: float | None = like(TrustRegion, "threshold")
    rollout_rs: Rejection | None = like(TrustRegion, "rollout_rs", limits=(WHOLE_ROWS,))
    rollout_rs_threshold: float | None = like(TrustRegion, "rollout_rs_threshold", needs=(A_REJECTION,))
    dppo_mask: DPPOMask | None = like(TrustRegion, "dppo_mask")
    dppo_mask_low: float = like(TrustRegion, "dppo_mask_low", needs=(A_DPPO,))
    dppo_mask_high: float = like(TrustRegion, "dppo_mask_high", needs=(A_DPPO,))
    advantage_baseline: Baseline = setting("leave_one_out", ignored_by=anchor.TINKER)
    """What rewards are compared with: leave_one_out (mean of the group's others), or mean (of all, as in GRPO)."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.trust  # noqa: B018  (refuses bounds that cross)
        for text in without_effect(self):
            warnings.warn(text, KLWarning, stacklevel=3)

    @property
    def clip_high(self) -> float:
        """The upper bound of the ratio in force, as its distance from 1."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def trust(self) -> TrustRegion:
        """The trust region to the sampler."""
        return TrustRegion(**{of_region: getattr(self, name) for name, of_region in TRUST.items()})

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

    Lengths are in tokens; without a `max_length`, the divisor of `fixed_length`, that is the mean too.
    """
    if reduction == "sequence_sum":
        return 1.0
    return float(max_length) if reduction == "fixed_length" and max_length is not None else mean_length


def build_objective(
    kl: KLConfig, loss: LossConfig, *, max_length: int, teacher: TeacherConfig | None = None
) -> Objective:
    """The objective of `grpo_loss` that KL terms and a policy loss describe together; coefficients in reward per nat.

    Equation: R[surrogate_t] + beta R_kl[penalty_t] + teacher_coef R[penalty_t to the teacher], see `grpo_loss`; R of
    `loss`, R_kl by `kl.kl_normalizer` or R.

    Args:
        kl, loss, teacher: the KL term with the starting beta; the policy loss; the second anchor, or None.
        max_length: longest completion in tokens, the divisor of dr_grpo.

    Raises:
        ConfigError: the KL in the reward together with advantages divided by the group's std; arguments of other types.
    """
    check_instance("kl", kl, KLConfig)
    check_instance("loss", loss, LossConfig)
    check_number("max_length", max_length, AT_LEAST_1.but("a completion has tokens", "pass max_length"), whole=True)
    check_beyond(kl, teacher)
    for text in beyond_cautions(kl, teacher):
        warnings.warn(text, KLWarning, stacklevel=3)
    terms = [Weighted(kl.beta, kl.build_term())]
    if teacher is not None and teacher.there:
        terms.append(Weighted(teacher.teacher_coef, teacher.build_term()))
    for prefix, (coefficient, term) in zip(("kl", "teacher"), terms, strict=False):
        mode = loss.vllm_importance_sampling_mode
        refuse([baseline_refusal(prefix, term, LOSS_TYPES[loss.loss_type].reduction, mode)])
        if coefficient != 0 and term.placement == "reward" and loss.scale == "std":
            raise ConfigError(
                "the KL in the reward cannot be combined with advantages divided by the group's std",
                got=f"{prefix}_placement='reward', loss_type={loss.loss_type!r}, scale_rewards='std'",
                why="in a group whose rewards are all equal the division cancels beta: every beta > 0 trains alike",
                fix=f"set scale_rewards='none', or {prefix}_placement='advantage' (the KL enters after the division)",
            )
    return Objective(
        surrogate=loss.surrogate,
        clip_low=loss.epsilon,
        clip_high=loss.clip_high,
        reduction=LOSS_TYPES[loss.loss_type].reduction,
        max_length=max_length,
        terms=(*terms, *kl.beside()),
        trust=loss.trust,
    )


@dataclass(frozen=True, kw_only=True)
class Price:
    """The exchange rate between reward and KL that a configuration trains at."""

    beta: float
    length_ratio: float = 1.0
    """The divisor of the policy loss over the KL's; 1 where both are reduced alike."""
    baseline_ratio: float = 1.0
    """G / (G - 1) where a group's mean, own reward included, is the baseline; else 1."""
    scaled: bool = False
    """Whether advantages are divided by the group's standard deviation, so that no single number is the price."""

    @property
    def per_completion(self) -> float:
        """Reward per nat of a whole completion; where advantages are scaled, per unit of the group's deviation too."""
        return self.beta * self.length_ratio * self.baseline_ratio

    def at(self, reward_std: float) -> float:
        """The price in a group whose rewards have this standard deviation, in reward per nat of a completion."""
        return self.per_completion * reward_std if self.scaled else self.per_completion


def price_of(
    beta: float, *, placement: Placement, baseline: Baseline, scale: Scale, group_size: int, length_ratio: float = 1.0
) -> Price:
    """The price of one nat of KL of a whole completion, in reward, in groups of at least two.

    Equation: beta * length_ratio * G / (G - 1) * s; G / (G - 1) for a baseline that is the group's mean, with the KL in
    the loss or the advantage; s the standard deviation of the group's rewards if advantages are divided by it (left to
    `Price.at`). A KL in the reward is divided by the reward's divisor: its price is beta.
    """
    inside = placement == "reward"
    return Price(
        beta=beta,
        length_ratio=length_ratio,
        baseline_ratio=group_size / (group_size - 1) if baseline == "mean" and not inside else 1.0,
        scaled=not inside and scale == "std",
    )


def configured_price(
    kl: KLConfig, loss: LossConfig, *, group_size: int, mean_length: float, max_length: int, beta: float | None = None
) -> Price:
    """The price that a configuration trains at, see `price_of`; `beta` in force, None: the configuration's."""
    of_loss, of_kl = (
        divisor(reduction, mean_length=mean_length, max_length=max_length)
        for reduction in (LOSS_TYPES[loss.loss_type].reduction, kl_reduction(kl, loss))
    )
    return price_of(
        kl.beta if beta is None else beta,
        placement=kl.kl_placement,
        baseline=loss.advantage_baseline,
        scale=loss.scale,
        group_size=group_size,
        length_ratio=of_loss / of_kl,
    )


def price_at_distance(rewards: Tensor, kl: float, *, direction: Direction = "reverse") -> float:
    """The price at which the best policy lies `kl` nats per completion from the one that earned these rewards.

    Equation: the p for which the mean over groups of D(1 / p) is kl (G - 1) / G. D(t) = KL(q || uniform), where q is
    proportional to exp(t reward) over the G completions of a group; with the penalty KL(ref||policy), direction
    `forward`, to 1 / (v - t reward), v such that q = 1 / (G (v - t reward)). To second order p = s / sqrt(2 kl), s^2
    the mean variance within groups. If one completion alone is best, D ends at log G; then D is at least the second
    order's.

    Shapes: rewards [n, G]; `kl` in nats per completion, above 0 -> reward per nat of a completion, 0.0 if none leads
    so far.
    """
    rewards = rewards.double().cpu()  # every step of the search reads a number
    rewards, size = rewards - rewards.amax(-1, keepdim=True), rewards.shape[-1]
    kl, scale = kl * (size - 1) / size, float(rewards.abs().max())
    low, high = -30.0, 30.0  # log of 1 / price, in units of the largest difference
    if scale == 0 or _distance(rewards / scale, math.exp(high), direction) <= kl:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _distance(rewards / scale, math.exp(middle), direction) < kl else (low, middle)
    return scale / math.exp(high)


def _distance(rewards: Tensor, tilt: float, direction: Direction) -> float:
    """D(tilt) of `price_at_distance`, mean over groups, in nats; rewards less their group's best. [n, G]"""
    logprobs = (tilt * rewards).log_softmax(-1) if direction == "reverse" else _forward_best(tilt * rewards)
    kl = (logprobs.exp() * (logprobs + math.log(rewards.shape[-1]))).sum(-1)
    second_order = tilt**2 * rewards.var(-1, correction=0) / 2
    return float(torch.where((rewards == 0).sum(-1) == 1, torch.maximum(kl, second_order), kl).mean())


def _forward_best(rewards: Tensor) -> Tensor:
    """log q of `price_at_distance` for the forward direction, by Newton's method from below. [n, G]"""
    size = rewards.shape[-1]
    level = torch.full_like(rewards[:, :1], 1 / size)
    for _ in range(8):  # the harmonic mean of level - rewards is concave in the level, and 1 at its end
        weights = 1 / (level - rewards)
        mean = weights.mean(-1, keepdim=True)
        level = level + (mean - 1) * mean / weights.square().mean(-1, keepdim=True)
    return -(size * (level - rewards)).log()


def spread_of_group(reward_std: float, saturated: float) -> float | None:
    """The mean deviation of rewards in unsaturated groups, from all groups' mean; None: all are saturated."""
    return reward_std / (1 - saturated) if saturated < 1 else None


def spreads_of_right_or_wrong(group_size: int) -> tuple[float, float]:
    """The least and largest standard deviation of a group of rewards 0 and 1, of which 1 or half are 1."""
    pairs = group_size * (group_size - 1)
    least, most = (math.sqrt(k * (group_size - k) / pairs) for k in (1, group_size // 2))
    return least, most
