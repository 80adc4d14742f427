"""The rules about how far the policy is from its reference, at the start, on the way, and for what reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

from klamp.diagnostics import causes
from klamp.diagnostics.alarm import Evidence, Limit, is_apart, number
from klamp.diagnostics.alarms_tokens import blame
from klamp.diagnostics.history import History

STEP_ZERO = Limit(
    value=1e-4,
    unit="nats per token before the first update",
    source="equal kernels give about 1e-6; a hundred times that leaves room for two implementations of one model",
)
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
REFERENCE_DIFFERS = Limit(
    value=0.02,
    unit="nats per token before the first update, to a reference that was chosen",
    source="klamp's choice: the smallest KL that a run is held at (docs/controllers.md)",
)
FAR_STEPS = 5
FAR = Limit(
    value=1.0,
    unit=f"nats per token, mean of {FAR_STEPS} steps",
    source="seen: a language model was best at .5 and fell into one word at 1.6 to 1.9; digits end at .1 to .3",
)
FAR_COMPLETION = Limit(
    value=8.0,
    unit="nats per completion besides",
    source="an answer of one token may need 3 to be right: that is not far",
)
GROWING = Limit(
    value=1.3,
    unit="times the KL of the 10 steps before, twice in a row and by 3 standard errors, above 0.1 nats per token, "
    "while the reward did not rise by 2",
    source="klamp's choice",
)
GROWING_FLOOR = 0.1


def step_zero(history: History) -> Evidence | None:
    """Finds a KL in the first step, before anything was updated."""
    metrics = _first_metrics(history)
    if metrics is None or history.settings.other_reference:
        return None
    names = ("kl/exact", "kl/k1") if history.settings.k3_over_updates else ("kl/k3", "kl/exact", "kl/k1")
    name = next((name for name in names if name in metrics), None)
    if name is None or not abs(metrics[name]) > STEP_ZERO.value:
        return None
    text = f"{name} is {metrics[name]:.2e} nats per token before the first update and should be about 0"
    return Evidence(text, blame(history, history.step))


def reference_differs(history: History) -> Evidence | None:
    """Finds a reference that was chosen and is far from the model that training starts from."""
    metrics = _first_metrics(history)
    if metrics is None or not history.settings.other_reference:
        return None
    name = next((name for name in ("kl/exact", "kl/k3") if name in metrics), None)
    if name is None or metrics[name] <= REFERENCE_DIFFERS.value:
        return None
    text = f"{name} is {number(metrics[name])} nats per token to the chosen reference, before the first update"
    return Evidence(text, blame(history, history.step))


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


def _first_metrics(history: History) -> Mapping[str, float] | None:
    """The metrics before the first update, while they are the latest."""
    return history.rows[0].metrics if len(history.rows) == 1 and history.rows[0].step <= 1 else None


def kl_far(history: History) -> Evidence | None:
    """Finds a policy that is far from its reference, however it got there."""
    values, length = _settled(history, FAR_STEPS), history.last("length/mean", FAR_STEPS)
    if values is None or not length or fmean(values) <= FAR.value:
        return None
    whole = fmean(values) * fmean(length)
    if whole <= FAR_COMPLETION.value:
        return None
    text = f"the KL is {number(fmean(values))} nats per token, {number(whole)} per completion, over {FAR_STEPS} steps"
    return Evidence(text, blame(history, history.step), _why_far(history))


def kl_growing(history: History) -> Evidence | None:
    """Finds a KL that goes on growing although the reward does not."""
    name = history.kl_name()
    kl, reward = history.last(name, 30) if name else [], history.last("reward", 30)
    if min(len(kl), len(reward)) < 30 or fmean(kl[20:]) < GROWING_FLOOR:
        return None
    parts = [kl[:10], kl[10:20], kl[20:]]
    for before, after in pairwise(parts):
        if fmean(after) < GROWING.value * fmean(before) or not is_apart(before, after, errors=3):
            return None
    early, late = reward[:10], reward[20:]
    if fmean(late) > fmean(early) and is_apart(early, late, errors=2):
        return None
    return Evidence(
        f"in 20 steps {name} grew from {number(fmean(parts[0]))} to {number(fmean(parts[2]))} nats per token, and the "
        f"reward went from {number(fmean(early))} to {number(fmean(late))}",
        causes=_why_far(history),
    )


def _why_far(history: History) -> list[str]:
    return causes.likely_causes(
        history, causes.learning_rate, causes.weak_kl, causes.stale_sampler, causes.pays_for_length, causes.repeats
    )


def kl_high(history: History) -> Evidence | None:
    """Finds a policy that is far from its reference."""
    values = _settled(history, 5)
    if values is None or fmean(values) <= HIGH.value:
        return None
    return Evidence(f"the KL is {number(fmean(values))} nats per token")


def kl_low(history: History) -> Evidence | None:
    """Finds a policy that is still near to its reference after the first steps."""
    values = _settled(history, 20)
    if values is None or fmean(values) >= LOW.value:
        return None
    return Evidence(f"the KL is {number(fmean(values))} nats per token")


def _settled(history: History, steps: int) -> list[float] | None:
    """The mean KL of the last 5 steps, once there are so many."""
    name = history.kl_name()
    values = history.last(name, 5) if name and len(history.rows) >= steps else []
    return values if len(values) == 5 and all(map(math.isfinite, values)) else None
