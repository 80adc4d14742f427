"""The rules about the KL to the reference; what each finding means is written in `klamp.diagnostics.alarms`."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from klamp.diagnostics.alarm import Evidence, Limit, is_apart, number
from klamp.diagnostics.alarms_tokens import blame, improbable_k1
from klamp.diagnostics.history import History

STEP_ZERO = Limit(
    value=1e-4,
    unit="nats per token before the first update",
    source="equal kernels give about 1e-6; a hundred times that leaves room for two implementations of one model",
)
NEGATIVE_STEPS = Limit(
    value=20, unit="steps in a row", source="by chance alone, one in a million: KL is never negative, k1 is unbiased"
)
NEGATIVE_K1 = Limit(value=1e-4, unit="nats per token below 0", source="the size of the step-zero limit")
FAR_WINDOW, FAR_RATIO, FAR_FLOOR = 5, 10.0, 0.05
FAR = Limit(
    value=FAR_RATIO,
    unit=f"times k1 (and the exact KL), mean over {FAR_WINDOW} steps, k3 above {FAR_FLOOR} nats per token",
    source="both estimate the same KL; below the floor (the GRPO tutorial's lower target) k1 may be 0 by noise",
)
FAR_AT_ONCE = Limit(
    value=100, unit="times k1 in one step, k3 above 1 nat per token", source="seen in the field: k3 1635, k1 .003"
)
SPIKE = Limit(value=3, unit="times the highest of the 5 steps before", source="klamp's choice")
SPIKE_FLOOR = Limit(
    value=0.2,
    unit="nats per token; 1 where there are fewer than 5 steps to compare with, or completions of fewer than 8 prompts",
    source="the GRPO tutorial's warning sign (docs/sources.md)",
)
SPIKE_PROMPTS = 8
"""With fewer prompts per step than this, the KL changes from step to step just because the prompts do."""
DROP = Limit(
    value=3,
    unit="standard deviations of the reward over the 10 steps before, and a tenth of it",
    source="klamp's choice",
)
DROP_WAIT = 3
DILUTION = Limit(
    value=1.2,
    unit="times longer and as much less KL per token, last 10 steps against the 10 before",
    source="klamp's choice; each change must exceed 3 standard errors",
)
DILUTION_KEPT = Limit(value=0.9, unit="of the KL per completion is still there", source="else it is no dilution")
DETACHED_WINDOW, DETACHED_ERRORS = 5, 4.0
DETACHED = Limit(
    value=0.01,
    unit="of the KL that the reward's change proves; after 20 steps, a change of 4 standard errors",
    source="Pinsker: a reward of range R that changed by d needs 2 (d / R)^2 nats per completion",
)
HIGH = Limit(
    value=0.2, unit="nats per token, mean of 5 steps", source="the GRPO tutorial's warning signs (docs/sources.md)"
)
LOW = Limit(
    value=0.01,
    unit="nats per token, mean of 5 steps after 20",
    source="the GRPO tutorial's warning signs (docs/sources.md)",
)


def step_zero(history: History) -> Evidence | None:
    """Finds a KL in the first step, before anything was updated."""
    if len(history.rows) != 1 or history.rows[0].step > 1 or history.settings.other_reference:
        return None
    metrics = history.rows[0].metrics
    names = ("kl/exact", "kl/k1") if history.settings.k3_over_updates else ("kl/k3", "kl/exact", "kl/k1")
    name = next((name for name in names if name in metrics), None)
    if name is None or not abs(metrics[name]) > STEP_ZERO.value:
        return None
    text = f"{name} is {metrics[name]:.2e} nats per token before the first update and should be about 0"
    return Evidence(text, blame(history, history.step))


def negative_k1(history: History) -> Evidence | None:
    """Finds a k1 that is below 0 step after step, or in one step by more than chance."""
    values = history.last("kl/k1", int(NEGATIVE_STEPS.value))
    if len(values) < NEGATIVE_STEPS.value or max(values) >= 0 or fmean(values) > -NEGATIVE_K1.value:
        return improbable_k1(history)
    return Evidence(f"kl/k1 was below 0 in {len(values)} steps in a row, {number(fmean(values))} nats per token")


def k3_far_above_k1(history: History) -> Evidence | None:
    """Finds k3 far above k1, although both estimate the same KL."""
    for window, ratio, floor in ((FAR_WINDOW, FAR_RATIO, FAR_FLOOR), (1, FAR_AT_ONCE.value, 1.0)):
        k1, k3 = history.last("kl/k1", window), history.last("kl/k3", window)
        if len(k1) < window or len(k3) < window:
            continue
        exact = history.last("kl/exact", window)
        other = max(abs(fmean(k1)), fmean(exact) if exact else 0.0)
        if fmean(k3) >= floor and fmean(k3) > ratio * other:
            over = f"over the last {window} steps" if window > 1 else "in this step"
            text = f"kl/k3 is {number(fmean(k3))} nats per token {over}, kl/k1 {number(fmean(k1))}"
            exact_text = f", kl/exact {number(fmean(exact))}" if exact else ""
            return Evidence(text + exact_text, blame(history, history.step))
    return None


def spike(history: History, *, ago: int = 0) -> tuple[float, float] | None:
    """The KL and the highest one before it, where the KL `ago` steps before the latest was a spike; else None."""
    name = history.kl_name()
    values = history.last(name, 6, before=ago) if name else []
    prompts = history.rows[-1 - ago].prompts if len(history.rows) > ago else None
    few = len(values) < 6 or (prompts is not None and prompts < SPIKE_PROMPTS)
    floor = 1.0 if few else SPIKE_FLOOR.value
    if len(values) < 2 or values[-1] < floor:
        return None
    highest = max(map(abs, values[:-1]))
    return (values[-1], highest) if values[-1] > SPIKE.value * highest else None


def kl_spike(history: History) -> Evidence | None:
    """Finds a KL that jumped in one step."""
    found = spike(history)
    if found is None:
        return None
    text = f"{history.kl_name()} jumped to {number(found[0])} nats per token, {number(found[1])} was the highest before"
    return Evidence(text, blame(history, history.step))


def spike_with_reward_drop(history: History) -> Evidence | None:
    """Finds a KL that jumped while the reward fell."""
    for ago in range(DROP_WAIT):
        found = spike(history, ago=ago)
        before, since = history.last("reward", 10, before=ago + 1), history.last("reward", ago + 1)
        if found is None or len(before) < 3 or not since:  # the reward may no longer be logged
            continue
        now = fmean(since)
        fallen = fmean(before) - now
        if fallen > max(DROP.value * stdev(before), 0.1 * abs(fmean(before))):
            text = (
                f"{history.kl_name()} jumped to {number(found[0])} nats per token and the reward fell from "
                f"{number(fmean(before))} to {number(now)}"
            )
            return Evidence(text, blame(history, history.rows[-1 - ago].step))
    return None


def dilution(history: History) -> Evidence | None:
    """Finds a KL per token that falls because completions grow."""
    name = history.kl_name()
    if name is None:
        return None
    kl, length = history.last(name, 20), history.last("length/mean", 20)
    if min(len(kl), len(length)) < 20 or fmean(kl[:10]) < LOW.value / 10:
        return None
    kl_ratio, length_ratio = (fmean(x[10:]) / max(fmean(x[:10]), 1e-12) for x in (kl, length))
    changed = all(is_apart(x[:10], x[10:], errors=3) for x in (kl, length))
    diluted = length_ratio > DILUTION.value and kl_ratio < 1 / DILUTION.value
    if not changed or not diluted or kl_ratio * length_ratio < DILUTION_KEPT.value:
        return None
    return Evidence(
        f"in 10 steps {name} went from {number(fmean(kl[:10]))} to {number(fmean(kl[10:]))} nats per token while "
        f"completions grew from {number(fmean(length[:10]))} to {number(fmean(length[10:]))} tokens: the KL of a whole "
        f"completion is {number(kl_ratio * length_ratio)} times what it was"
    )


def detached_reference(history: History) -> Evidence | None:
    """Finds a reward that changed by more than a policy so near to its reference could have changed it."""
    window = DETACHED_WINDOW
    name = _kl_to_the_start(history)
    if name is None or not history.penalized or len(history.rows) < 20:
        return None
    before, now = history.first("reward", window), history.last("reward", window)
    kl, length = history.last(name, window), history.last("length/mean", window)
    if min(map(len, (before, now, kl))) < window or not is_apart(before, now, errors=DETACHED_ERRORS):
        return None
    reward_range = max(1.0, 2 * max(map(abs, (*before, *now))))
    least = 2 * ((fmean(now) - fmean(before)) / reward_range) ** 2
    seen = max(fmean(kl), 0.0) * (fmean(length) if length else 1.0)
    if seen >= DETACHED.value * least:
        return None
    return Evidence(
        f"the reward went from {number(fmean(before))} to {number(fmean(now))}, which takes at least "
        f"{number(least)} nats per completion; the KL says {number(seen)}"
    )


def _kl_to_the_start(history: History) -> str | None:
    """The KL to the model that training started from, where the run logs it."""
    if history.settings.moving_reference:
        return "kl/k3_original" if history.rows and "kl/k3_original" in history.rows[-1].metrics else None
    return None if history.settings.other_reference else history.kl_name()


def kl_high(history: History) -> Evidence | None:
    """Finds a policy that is far from its reference."""
    values = _settled(history, 5)
    if values is None or fmean(values) <= HIGH.value:
        return None
    return Evidence(f"the KL is {number(fmean(values))} nats per token: policy drifting too much")


def kl_low(history: History) -> Evidence | None:
    """Finds a policy that is still near to its reference after the first steps."""
    values = _settled(history, 20)
    if values is None or fmean(values) >= LOW.value:
        return None
    return Evidence(f"the KL is {number(fmean(values))} nats per token: not learning enough")


def _settled(history: History, steps: int) -> list[float] | None:
    """The mean KL of the last 5 steps, once there are so many."""
    name = history.kl_name()
    values = history.last(name, 5) if name and len(history.rows) >= steps else []
    return values if len(values) == 5 and all(map(math.isfinite, values)) else None
