"""Advantages: how much better a completion is than the others of its group, which answer the same prompt."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.core.arguments import AT_LEAST_0, REALS, Numbers, check_data, check_number, check_tensors, check_values_exist
from klamp.core.masking import upcast
from klamp.errors import NonFiniteError, ShapeError, check_name

Scale: TypeAlias = Literal["std", "none"]
Baseline: TypeAlias = Literal["mean", "leave_one_out"]

GROUP_SIZES = Numbers(
    " >= 2",
    lambda x: x >= 2,
    "an advantage compares the completions of one prompt with each other; alone, it is always 0",
    "set num_generations to 2 or more (8 is usual)",
)
"""How many completions of a prompt make a group."""


def group_advantages(
    rewards: Float[Tensor, " batch"],
    group_size: int,
    *,
    scale: Scale = "std",
    baseline: Baseline = "mean",
    eps: float = 1e-4,
) -> Float[Tensor, " batch"]:
    """Advantage of each completion over its group, in units of reward (scale `none`) or of the group's std.

    Equation (group g of size G; m = mean, s = sample standard deviation with G - 1)::

        mean            a_i = r_i - m                              leave_one_out   a_i = (r_i - m) G / (G - 1)
        scale "std"     a_i / (s + eps)

    Sampler: the G completions of a prompt are independent samples of the policy.
    Value: `leave_one_out` without scaling gives an unbiased policy gradient, `mean` (G - 1)/G of that one, `std`
    a biased one. A group whose rewards are all equal gives exactly 0, never rounding noise / eps.
    Gradient: none wanted; rewards carry no gradient.
    Shapes: [B] with the G completions of a prompt next to each other -> [B].

    Raises:
        TensorError: rewards that are not a tensor of numbers, or have a gradient.
        ShapeError: the batch is not a whole number of groups.
        NonFiniteError: a reward that is NaN or infinite, or so large that its square is (1e18 in float32).
        ConfigError: a group of one, or an eps below 0.
        UnknownNameError: an unknown scale or baseline.

    Source: DeepSeekMath arXiv:2402.03300 (std), Dr. GRPO arXiv:2503.20783 (none), RLOO arXiv:2402.14740
    (leave_one_out)
    """
    check_name("advantage scale", scale, get_args(Scale))
    check_name("advantage baseline", baseline, get_args(Baseline))
    check_number("group_size", group_size, GROUP_SIZES, whole=True)
    check_number("eps", eps, AT_LEAST_0.but("it is added to a standard deviation", "1e-4 is the default"))
    check_tensors(REALS, rewards=rewards)
    check_values_exist("rewards", rewards)
    check_data(rewards=rewards)
    if rewards.ndim != 1 or rewards.shape[0] % group_size:
        raise ShapeError(
            "the rewards are not a whole number of groups",
            got=f"shape {tuple(rewards.shape)}, group size {group_size}",
            why="each group holds the completions of one prompt, next to each other",
            fix="pass one reward per completion, group by group",
        )
    groups = upcast(rewards).reshape(-1, group_size)
    # Squares of deviations are added up over a group.
    usable = groups.abs() <= torch.finfo(groups.dtype).max ** 0.5 / (2 * group_size)
    if not bool(usable.all()):
        raise NonFiniteError(
            "a reward is NaN or infinite, or too large for the variance of its group",
            got=f"{int((~usable).sum())} of {rewards.numel()}",
            why="one such reward would turn the advantages of its whole group into NaN",
            fix="return a finite number from the reward function",
        )
    centred = groups - groups.mean(-1, keepdim=True)
    if baseline == "leave_one_out":
        centred = centred * (group_size / (group_size - 1))
    if scale == "std":
        spread = groups.std(-1, keepdim=True) + eps
        centred = torch.where(spread > 0, centred / spread, torch.zeros_like(centred))  # squares too small for the type
    saturated = groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)
    return torch.where(saturated, torch.zeros_like(centred), centred).reshape(-1)


def saturated_share(rewards: Float[Tensor, " batch"], group_size: int) -> Float[Tensor, ""]:
    """Share of the groups whose rewards are all equal (no learning signal), in [0, 1]."""
    groups = rewards.view(-1, group_size)
    return (groups.amax(-1) == groups.amin(-1)).float().mean()
