"""The rules about the estimates of the KL, its jumps and its dilution; what each finding means: `alarms`."""

from __future__ import annotations

from statistics import fmean, stdev

from klamp.diagnostics import causes
from klamp.diagnostics.alarm import Evidence, Limit, is_apart, number
from klamp.diagnostics.alarms_tokens import blame, improbable_k1
from klamp.diagnostics.history import History

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
    unit="nats per token; 1 where there are fewer than 5 steps to compare with, or fewer than 16 prompts in a step",
    source="the GRPO tutorial's warning sign (docs/sources.md)",
)
SPIKE_PROMPTS = 16
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
DILUTION_FLOOR = 1e-3
"""Nats per token below which a falling KL is noise."""
DILUTION_KEPT = Limit(value=0.9, unit="of the KL per completion is still there", source="else it is no dilution")


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
    prompts = history.settings.prompts if prompts is None else prompts
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
    return Evidence(text, blame(history, history.step), _why(history))


def _why(history: History) -> list[str]:
    return causes.likely_causes(history, causes.learning_rate, causes.stale_sampler)


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
            return Evidence(text, blame(history, history.rows[-1 - ago].step), _why(history))
    return None


def dilution(history: History) -> Evidence | None:
    """Finds a KL per token that falls because completions grow."""
    name = history.kl_name()
    if name is None:
        return None
    kl, length = history.last(name, 20), history.last("length/mean", 20)
    if min(len(kl), len(length)) < 20 or fmean(kl[:10]) < DILUTION_FLOOR:
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
