"""The KL in other places than the loss: as a shift of the advantages, or taken from the rewards.

Then the service's built-in losses will do, in one pass instead of two. Only k1 belongs there, see klamp.core.penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.config.teacher import TeacherConfig
from klamp.core.arguments import check_instance
from klamp.core.masking import check_logprobs, masked, masked_mean
from klamp.core.penalty import shifted_advantages, shifted_rewards
from klamp.core.term import Gate
from klamp.core.types import Batch
from klamp.errors import ConfigError, ShapeError, check_name
from klamp.hosts.tinker.datums import as_length, number_row, pad, read_rows, tensor_data, with_inputs
from klamp.hosts.tinker.options import in_force, reference_length_of

Baseline: TypeAlias = Literal["none", "batch"]


def shift_advantages(
    data: Sequence[Any],
    kl: KLConfig | TeacherConfig,
    *,
    beta: float | None = None,
    baseline: Baseline = "none",
    group_size: int | None = None,
    reference_length: float | Sequence[float] | None = None,
) -> list[Any]:
    """The datums with beta times the sampler's KL, to the reference or a teacher, taken from their advantages.

    Equation: kl_horizon `token` A_t - beta delta_t, `sequence` A_t - beta sum_{j >= t} delta_j, delta = log sampler -
    log ref (or teacher); with `baseline="batch"` the shift's mean over all trained tokens is taken from the shift.
    `token` with that baseline is the KL penalty of Tinker's cookbook; to a teacher, without it, its on-policy
    distillation. (Its discounted form takes the mean from each token before it sums, and so pays a token for every
    token that follows; klamp takes it from the sums.)

    Sampler: whoever `logprobs` belong to.
    Gradient: none here; through the score function that of KL(policy || ref), see `kl_in_advantage`.

    For `forward_backward(strip_for_builtin(...), "ppo" or "importance_sampling")`. `compute_grpo_kl_loss` with the
    same configuration does this itself: give it the datums as they were.

    Args:
        data: datums with `ref_logprobs`; for a teacher with `teacher_logprobs`.
        kl: with kl_placement="advantage", or that of a teacher with teacher_placement="advantage".
        beta: coefficient in force instead of the configuration's; 0 returns the datums as they are.
        baseline: none, or batch.
        group_size: datums per prompt, next to each other, for a clip of the KL.
        reference_length: tokens that turn a threshold per token into a budget.

    Raises:
        ConfigError: another placement.
        DataError, ShapeError, NonFiniteError, EmptyMaskError: as `compute_grpo_kl_loss`.
    """
    _check_placement(kl, "advantage", "shift_advantages")
    check_name("baseline", baseline, get_args(Baseline))
    now = in_force(kl, beta)
    if now == 0:
        return list(data)
    to_teacher = isinstance(kl, TeacherConfig)
    own = None if to_teacher else kl
    rows = read_rows(data, reference=not to_teacher, teacher=to_teacher, exclusions=own is not None and own.excludes)
    term, length = kl.build_term(), as_length(reference_length_of(own, reference_length), len(rows.lengths))
    batch = rows.batch(rows.logprobs, group_size=group_size, reference_length=length).towards(term.anchor)
    shifted = shifted_advantages(batch, term, beta=now, gate=Gate.of(batch, term))
    if baseline == "batch":
        shifted = shifted - masked_mean(shifted - rows.advantages, rows.mask)
    shifted = masked(shifted, rows.mask)  # a reward-to-go reaches back into the prompt, which the built-in losses see
    return [
        with_inputs(datum, {**datum.loss_fn_inputs, "advantages": tensor_data(row[:length])})
        for datum, row, length in zip(data, shifted, rows.lengths, strict=True)
    ]


def penalize_rewards(
    rewards: Sequence[float],
    logprobs: Sequence[Sequence[float]],
    ref_logprobs: Sequence[Sequence[float]],
    kl: KLConfig | TeacherConfig,
    *,
    beta: float | None = None,
    kl_masks: Sequence[Sequence[float]] | None = None,
) -> list[float]:
    """Rewards minus beta times the KL of each response: kl_placement `reward`, before advantages are formed.

    Equation: r_i - beta sum_t delta_it, delta = log sampler - log ref; a sum, never a mean over the response.

    Sampler: whoever `logprobs` belong to.
    Gradient: none here, see `kl_in_reward`: form the advantages without dividing by the group's standard deviation
    (`group_advantages(..., scale="none")`), or beta drops out of groups whose rewards are all equal.

    Args:
        rewards: one per response.
        logprobs: of the sampler, per token of each response.
        ref_logprobs: of the reference (or the teacher), likewise (`compute_reference_logprobs`).
        kl: with kl_placement="reward", or that of a teacher with teacher_placement="reward".
        beta: coefficient in force instead of the configuration's.
        kl_masks: 1 = the token carries the KL; None: every token. Leave tokens out by their position only.

    Raises:
        ConfigError: another placement, or a clip.
        ShapeError: rows of different lengths.
        NonFiniteError: a log-probability that is NaN, infinite or positive.
    """
    _check_placement(kl, "reward", "penalize_rewards")
    if isinstance(kl, KLConfig) and kl.kl_clip_method != "none":
        raise ConfigError(
            "penalize_rewards cannot clip the KL",
            got=f"kl_clip_method={kl.kl_clip_method!r}",
            why="the gate has to come after the baseline: in the rewards the gates of the others, which depend on this "
            "response, would enter its baseline",
            fix="set kl_clip_method='none', or kl_placement='advantage' (shift_advantages)",
        )
    batch = _responses(logprobs, ref_logprobs, kl_masks)
    if len(rewards) != len(logprobs):
        raise ShapeError(
            "rewards does not hold one number per response",
            got=f"{len(rewards)} rewards, {len(logprobs)} rows of log-probabilities",
            why="a reward belongs to a completion as a whole",
            fix="pass one reward per response, in the same order",
        )
    now, term = in_force(kl, beta), kl.build_term()
    if term.anchor == "teacher":
        batch = replace(batch, teacher_logprobs=batch.ref_logprobs, ref_logprobs=None)
    return shifted_rewards(number_row("rewards", rewards).float(), batch, term, beta=now).tolist()


def _responses(
    logprobs: Sequence[Sequence[float]],
    ref_logprobs: Sequence[Sequence[float]],
    kl_masks: Sequence[Sequence[float]] | None,
) -> Batch:
    sampler, ref = _tensors("logprobs", logprobs), _tensors("ref_logprobs", ref_logprobs)
    carried = [torch.ones(len(row), dtype=torch.bool) for row in sampler]
    if kl_masks is not None:
        carried = [row != 0 for row in _tensors("kl_masks", kl_masks)]
    for name, rows in (("ref_logprobs", ref), ("kl_masks", carried)):
        if [len(row) for row in rows] != [len(row) for row in sampler]:
            raise ShapeError(
                f"{name} and logprobs have different lengths",
                got=f"{[len(row) for row in rows]} and {[len(row) for row in sampler]}",
                why="each holds one number per token of the same responses",
                fix="pass what compute_reference_logprobs returned for these responses, in the same order",
            )
    for i, (mine, other) in enumerate(zip(sampler, ref, strict=True)):
        everywhere = torch.ones(1, len(mine), dtype=torch.bool)
        check_logprobs(f"response {i}: logprobs", mine[None], everywhere)
        check_logprobs(f"response {i}: ref_logprobs", other[None], everywhere)
    return Batch(
        policy_logprobs=pad(sampler),
        mask=pad(carried),
        advantages=torch.zeros(len(sampler)),
        ref_logprobs=pad(ref),
    )


def _tensors(name: str, rows: Sequence[Sequence[float]]) -> list[Tensor]:
    return [number_row(f"{name}[{i}]", row) for i, row in enumerate(rows)]


def _check_placement(kl: KLConfig | TeacherConfig, placement: str, function: str) -> None:
    who = "teacher" if isinstance(kl, TeacherConfig) else "kl"
    if who == "kl":
        check_instance("kl", kl, KLConfig)
    if getattr(kl, f"{who}_placement") != placement:
        raise ConfigError(
            f"{function} is for {who}_placement={placement!r}",
            got=f"{who}_placement={getattr(kl, f'{who}_placement')!r}",
            why="the KL would enter in two places, or in another one than the configuration says",
            fix=f"{type(kl).__name__}({who}_estimator='k1', {who}_placement={placement!r}, {who}_horizon='sequence')",
        )
