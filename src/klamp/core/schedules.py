"""A schedule of beta over a run: a factor on the beta that the controller gives."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from klamp.errors import ConfigError, check_name

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]


def kl_schedule_factor(
    step: int, total_steps: int, *, schedule: Schedule = "constant", warmup_steps: int = 0, end: float = 0.0
) -> float:
    """The factor on beta at a step, in [0, 1].

    Equation (w = warmup_steps, x = (step - w) / (total_steps - w), e = end)::

        step < w    step / w
        constant    1
        linear      1 - (1 - e) x
        cosine      e + (1 - e) (1 + cos(pi x)) / 2

    Args:
        step: steps done, from 0.
        total_steps: steps of the run.
        schedule: `constant`, `linear` or `cosine`.
        warmup_steps: steps of linear growth from 0.
        end: factor at the end, in [0, 1].

    Raises:
        UnknownNameError: an unknown schedule.
        ConfigError: a negative warm-up, or an end outside [0, 1].
    """
    check_name("KL schedule", schedule, get_args(Schedule))
    if warmup_steps < 0 or not 0 <= end <= 1:
        raise ConfigError(
            "the KL schedule needs warmup_steps >= 0 and an end in [0, 1]",
            got=f"warmup_steps={warmup_steps}, end={end}",
            why="the factor scales beta, which is never negative",
            fix="warmup_steps=0 and end=0.0 are the defaults",
        )
    if step < warmup_steps:
        return step / warmup_steps
    x = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return 1 - (1 - end) * x
    return 1.0 if schedule == "constant" else end + (1 - end) * (1 + math.cos(math.pi * x)) / 2
