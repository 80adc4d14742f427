"""The learning rate of a run that goes on with another rate, or to another last step: without a jump up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

SMALL = 1e-9
"""Relative difference of two rates that is none."""


def go_on_from(schedule: LambdaLR, steps: int, rate: float, *, warmup: int = 0, updates: int = 1) -> str:
    """Have a schedule go on by its own plan at the rate that is asked for now, whatever its saved state says.

    Equation: rate_n = rate (plan_n - rise left_n), where left falls from 1 to 0 over `warmup` steps, and rate * rise is
    what the plan is above the rate that the saved state would have taken next. A rate that is lower now counts at once,
    a higher one is reached over a warm-up; where nothing changed, the rates are those of a run that never stopped.

    Args:
        schedule: made for what is asked for now, with the saved state loaded; it saves its rise with its state.
        steps: how often it was advanced.
        rate: the peak of the learning rate.
        warmup: steps of the run in which a rate that is higher now is reached; 0: at once.
        updates: how often it is advanced in a step of the run, all of whose updates have one rate.

    Returns:
        What to tell the user where the rate goes up; empty: it does not.
    """
    saved: Any = schedule  # an attribute of one's own is saved and loaded with the others
    plans = [getattr(plan, "plan", plan) for plan in schedule.lr_lambdas]
    before, saved.rise = schedule.get_last_lr()[0], getattr(schedule, "rise", None) or [0, 0.0, 0, 1]
    schedule.lr_lambdas = [_risen(saved, plan) for plan in plans]
    text, planned = "", rate * plans[0](steps)
    if abs(rate * schedule.lr_lambdas[0](steps) - before) > SMALL * rate:
        saved.rise = [steps, max(0.0, planned - before) / (rate or 1.0), warmup, updates]
    if saved.rise[0] == steps and saved.rise[1] > SMALL:
        over = f"over {warmup} steps (warmup_steps)" if warmup else "at once, since warmup_steps is 0"
        text = f"The learning rate goes up at this resume, from {before:.3g} to {planned:.3g}, {over}."
    schedule.last_epoch, saved.base_lrs = steps, [rate] * len(plans)
    schedule._last_lr = [rate * plan(steps) for plan in schedule.lr_lambdas]
    for group, now in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"], group["initial_lr"] = now, rate
    return text


def _risen(saved: Any, plan: Callable[[int], float]) -> Callable[[int], float]:
    """The plan's factor at a count, less what is left of the rise."""

    def factor(count: int) -> float:
        since, rise, warmup, updates = saved.rise
        left = 1 - ((count - since) // updates + 1) / warmup if warmup else 0.0
        return plan(count) - rise * max(0.0, left)

    factor.plan = plan  # pyright: ignore[reportFunctionMemberAccess]  (a schedule that goes on twice has one rise)
    return factor
