"""The rules about the KL: its estimates, its jumps and its dilution; how far the policy is from its reference; and
how strongly beta pulls against the reward. What each finding means: `alarms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, stdev

from klamp.diagnostics import causes
from klamp.diagnostics.alarm import Evidence, Limit, is_apart, is_beyond, noise, number, tokens_told
from klamp.diagnostics.alarms_run import not_trained
from klamp.diagnostics.alarms_tokens import blame, improbable_k1
from klamp.diagnostics.causes import kl_pull, spread_within_groups
from klamp.diagnostics.history import EARLY, History, Row, bounded

NEGATIVE_STEPS = Limit(
    value=20, unit="steps in a row", source="by chance alone, one in a million: KL is never negative, k1 is unbiased"
)
NEGATIVE_K1 = Limit(value=1e-4, unit="nats per token below 0", source="the size of the step-zero limit")
NEGATIVE_AT_ONCE = Limit(
    value=0.1,
    unit="nats per token below 0 in one step, of few tokens 14 in all, or 14 per completion",
    source="E[exp(-k1)] <= 1: one in a million over 140 tokens, or over one completion",
)
NEGATIVE_COMPLETION = 14.0
NEGATIVE_FEW = Limit(
    value=8,
    unit="steps in a row, and as many standard errors below 0 by their own scatter",
    source="the share of Student's t beyond that is 5 in 100,000",
)
FAR_WINDOW, FAR_RATIO, FAR_FLOOR = 5, 10.0, 0.05
FAR_ERRORS, FAR_NOISE = 3.0, 20
K3_FAR = Limit(
    value=FAR_RATIO,
    unit=f"times k1 (and the exact KL), mean over {FAR_WINDOW} steps, k3 above {FAR_FLOOR} nats per token",
    source="both estimate the same KL; the floor is the GRPO tutorial's lower target",
)
FAR_AT_ONCE = Limit(
    value=100, unit="times k1 in one step, k3 above 1 nat per token", source="seen in the field: k3 1635, k1 .003"
)
SPIKE_MEMORY, SPIKE_ERRORS, SAME_KL = 20, 6.0, 1e-4
SPIKE = Limit(
    value=3,
    unit="times the highest of the 20 steps before; of samples twice in a row, or far beyond their scatter",
    source="klamp's choice",
)
SPIKE_FLOOR = Limit(
    value=0.2,
    unit="nats per token; 1 where there are fewer than 5 steps to compare with, or fewer than 16 prompts in a step",
    source="the GRPO tutorial's warning sign (docs/sources.md)",
)
SPIKE_PROMPTS = 16
"""With fewer prompts per step than this, the KL changes from step to step just because the prompts do."""
AFTERWARDS = 2
"""Steps after a jump that tell whether the policy moved."""
OUTLIER = (
    "one batch, or a few tokens that the reference finds hardly possible: the weights moved little, so the learning "
    "rate is not to blame. Look at the tokens of that step; bound the log-ratio (kl_max_log_ratio)"
)
DILUTION = Limit(
    value=1.2,
    unit="times longer and as much less KL per token, last 10 steps against the 10 before",
    source="klamp's choice; each change must exceed 3 standard errors",
)
DILUTION_FLOOR = 1e-3
"""Nats per token below which a falling KL is noise."""
DILUTION_KEPT = Limit(value=0.9, unit="of the KL per completion is still there", source="else it is no dilution")


def negative_k1(history: History) -> Evidence | None:
    """Finds an estimate that is below 0 step after step, or in one step by more than chance."""
    at_once = {"kl/k1": NEGATIVE_AT_ONCE.value, "kl/k3": NEGATIVE_AT_ONCE.value, "kl/k1_sequence": NEGATIVE_COMPLETION}
    for name, limit in at_once.items():
        unit = "completion" if name.endswith("sequence") else "token"
        value = history.latest.get(name, 0.0)
        if value < -limit and (unit == "completion" or value < -NEGATIVE_COMPLETION / tokens_told(history)):
            return Evidence(f"{name} is {number(history.latest[name])} nats per {unit} in this step")
    return next(filter(None, (_below_zero(history, name) for name in at_once)), None) or improbable_k1(history)


def _below_zero(history: History, name: str) -> Evidence | None:
    values = history.last(name, int(NEGATIVE_STEPS.value))
    while values and max(values) >= 0:
        values = values[1:]
    if len(values) < NEGATIVE_FEW.value or fmean(values) > -NEGATIVE_K1.value:
        return None
    if len(values) < NEGATIVE_STEPS.value and -fmean(values) < NEGATIVE_FEW.value * stdev(values) / len(values) ** 0.5:
        return None
    return Evidence(f"the last {len(values)} values of {name} are below 0, {number(fmean(values))} nats on average")


def k3_far_above_k1(history: History) -> Evidence | None:
    """Finds k3 far above k1, although both estimate the same KL."""
    for window, ratio, floor in ((FAR_WINDOW, FAR_RATIO, FAR_FLOOR), (1, FAR_AT_ONCE.value, 1.0)):
        k1, k3 = history.together(window, "kl/k1", "kl/k3")
        if len(k1) < window or not math.isfinite(sum(history.latest.get(x, math.nan) for x in ("kl/k1", "kl/k3"))):
            continue
        exact = history.last("kl/exact", window)
        scatter = noise(history.last("kl/k1", FAR_NOISE)) / window**0.5
        other = max(abs(fmean(k1)) + FAR_ERRORS * scatter, fmean(exact) if exact else 0.0)
        if fmean(k3) >= floor and fmean(k3) > ratio * other:
            over = f"on average of the last {window}" if window > 1 else "in this step"
            text = f"kl/k3 is {number(fmean(k3))} nats per token {over}, kl/k1 {number(fmean(k1))}"
            exact_text = f", kl/exact {number(fmean(exact))}" if exact else ""
            return Evidence(text + exact_text, blame(history, history.step))
    return None


def kl_spike(history: History) -> Evidence | None:
    """Finds a KL that jumped: in one step, or of samples that scatter in a step and the one after it."""
    prompts = (history.rows[-1].prompts if history.rows else None) or history.settings.prompts or SPIKE_PROMPTS
    exact = history.kl_name() == "kl/exact"
    for stays in (1,) if exact else (1, 2):
        values = history.kl(SPIKE_MEMORY + stays)
        before, now = values[:-stays], min(values[-stays:], default=0.0)
        few = len(before) < 5 or prompts < SPIKE_PROMPTS
        highest = max(map(abs, before), default=math.inf)
        if now < (1.0 if few else SPIKE_FLOOR.value) or now <= SPIKE.value * highest:
            continue
        if stays == 2 or len(before) < 5 or exact or _stands_out(before, now):
            jump = causes.last_jump if stays == 1 else causes.learning_rate
            why = causes.likely_causes(history, jump, causes.stale_sampler)
            said = f"{number(max(before))} was the highest of {len(before)} before"
            text = f"{history.kl_name()} jumped to {number(now)} nats per token, {said}"
            return Evidence(text, blame(history, history.step), why)
    return None


def _stands_out(before: Sequence[float], now: float) -> bool:
    """Whether a value lies beyond what the curve scattered by, in powers of e: sampled KLs have a long tail."""
    logs = [math.log(abs(value)) for value in before if abs(value) > SAME_KL]
    return len(logs) < 2 or abs(math.log(max(abs(now), 1e-9)) - fmean(logs)) > SPIKE_ERRORS * noise(logs)


def after_spike(history: History, seen: Evidence, after: Sequence[Row]) -> Evidence:
    """What the steps after a jump say of it: it was back at once, or it stayed.

    Args:
        history: the run up to the jump.
        seen: what was seen when it rose.
        after: the logged steps after it.
    """
    name = history.kl_name()
    now, before = history.kl(1)[-1], median([*history.last(name, 5, before=1), 0.0])
    then = [bounded(row.metrics[name]) for row in after[:AFTERWARDS] if math.isfinite(row.metrics.get(name, math.nan))]
    if not then:
        return seen
    if max(then) < before + min((now - before) / 2, max(causes.JUMP, before)) and not history.settings.moving_reference:
        return Evidence(f"{seen.text}, {number(then[0])} the value after it", seen.tokens, [OUTLIER])
    view = History(settings=history.settings, rows=[*history.rows, *after[:AFTERWARDS]])
    return Evidence(seen.text, seen.tokens, causes.likely_causes(view, causes.learning_rate, causes.stale_sampler))


def dilution(history: History) -> Evidence | None:
    """Finds a KL per token that falls because completions grow."""
    name, (kl, length) = history.kl_name(), history.together(20, history.kl_name(), "length/mean")
    if len(kl) < 20 or fmean(kl[:10]) < DILUTION_FLOOR:
        return None
    kl_ratio, length_ratio = (fmean(x[10:]) / max(fmean(x[:10]), 1e-12) for x in (kl, length))
    changed = all(is_apart(x[:10], x[10:], errors=3) for x in (kl, length))
    diluted = length_ratio > DILUTION.value and kl_ratio < 1 / DILUTION.value
    if not changed or not diluted or kl_ratio * length_ratio < DILUTION_KEPT.value:
        return None
    return Evidence(
        f"{name} went from {number(fmean(kl[:10]))} to {number(fmean(kl[10:]))} nats per token while completions grew "
        f"from {number(fmean(length[:10]))} to {number(fmean(length[10:]))} tokens (means of 10 values): the KL of a "
        f"whole completion is about {number(kl_ratio * length_ratio)} times what it was"
    )


STEP_ZERO = Limit(
    value=1e-4,
    unit="nats per token before the first update",
    source="equal kernels give about 1e-6; a hundred times that leaves room for two implementations of one model",
)
STEP_ZERO_OTHERS = Limit(
    value=3e-3,
    unit="nats per token, in the record of another trainer, and 4 standard errors of as many tokens as it tells",
    source="what bfloat16 against float32 explains: .02 to .07 on average in size",
)
DETACHED_WINDOW, DETACHED_ERRORS = 5, 4.0
DETACHED = Limit(
    value=0.01,
    unit="of the KL that the reward's change proves; after 20 steps, a change of 4 standard errors",
    source="Pinsker: a reward of range R that changed by d needs 2 (d / R)^2 nats per completion",
)
STILL = Limit(value=20, unit="steps in a row at exactly 0", source="no update rounds to nothing in all tokens")
FELL = Limit(
    value=0.01,
    unit="of the lower KL of the 2 steps before, which were above 0.02 nats per token, in one step; again and again "
    "after equally many steps, it is a reference that is reset on purpose",
    source="seen: .47 to 0 where a resume made the reference of the checkpoint",
)
HIGH = Limit(
    value=0.2,
    unit="nats per token, mean of 5 steps without the largest",
    source="the GRPO tutorial's warning signs (docs/sources.md)",
)
LOW = Limit(
    value=0.01,
    unit="nats per token, mean of 5 steps without the largest, after 20",
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
    unit=f"nats per token, mean of {FAR_STEPS} steps without the largest",
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
    "while the reward did not rise by 1",
    source="klamp's choice",
)
GROWING_FLOOR = 0.1


def step_zero(history: History) -> Evidence | None:
    """Finds a KL in the first step, before anything was updated."""
    names = ("kl/exact", "kl/k1") if history.settings.k3_over_updates else ("kl/k3", "kl/exact", "kl/k1")
    name, kl = _first_kl(history, names)
    elsewhere = history.settings.other_kernels
    found = is_beyond(history, name, kl, STEP_ZERO_OTHERS.value) if elsewhere else abs(kl) > STEP_ZERO.value
    if history.settings.other_reference or not found:
        return None
    text = f"{name} is {kl:.2e} nats per token before the first update and should be about 0"
    return Evidence(text, blame(history, history.step))


def reference_differs(history: History) -> Evidence | None:
    """Finds a reference that was chosen and is far from the model that training starts from."""
    name, kl = _first_kl(history, ("kl/exact", "kl/k3"))
    limit = REFERENCE_DIFFERS.value
    if not history.settings.other_reference or not kl > limit:
        return None
    if name != "kl/exact" and not is_beyond(history, name, kl, limit):
        return None
    text = f"{name} is {number(kl)} nats per token to the chosen reference, before the first update"
    return Evidence(text, blame(history, history.step))


def detached_reference(history: History) -> Evidence | None:
    """Finds a reward that changed by more than a policy so near to its reference could have, or a KL that vanished."""
    if (vanished := _vanished(history)) is not None:
        return vanished
    window = DETACHED_WINDOW
    name = _kl_to_the_start(history)
    if not name or not history.penalized or len(history.rows) < 20 or not_trained(history):
        return None
    moves = [x for x in ("train/learning_rate", "train/grad_norm") if history.latest.get(x, 0.0) > 0]
    why = [FOLLOWS] if len(moves) == 2 else []
    before, now = history.first("reward", window), history.last("reward", window)
    kl, length = history.last(name, window), history.last("length/mean", window)
    curve = history.last("reward", EARLY)
    if min(map(len, (before, now, kl))) < window or not is_apart(before, now, errors=DETACHED_ERRORS, curve=curve):
        still, equal = (history.last(each, int(STILL.value)) for each in (name, "groups/saturated"))
        if len(still) < STILL.value or any(still) or min(equal, default=0.0) == 1:
            return None
        said = [f"the last {len(still)} values of {name} are exactly 0"]
        said += [f"{x} is {number(history.latest[x])}" for x in moves]
        return Evidence(", ".join(said), causes=why)
    reward_range = max(1.0, 2 * max(map(abs, (*before, *now))))
    least = 2 * ((fmean(now) - fmean(before)) / reward_range) ** 2
    seen = abs(fmean(kl)) * (fmean(length) if length else 1.0)
    if max(map(abs, history.last(name, 20))) * (fmean(length) if length else 1.0) >= DETACHED.value * least:
        return None
    return Evidence(
        f"the reward went from {number(fmean(before))} to {number(fmean(now))}, which takes at least "
        f"{number(least)} nats per completion on like prompts, if rewards differ by {number(reward_range)} at most; "
        f"the KL is {number(seen)}{'' if length else ' per token'}",
        causes=why,
    )


FOLLOWS = (
    "the reference follows the policy: shared weights, an adapter that is on in its pass too, or weights that were "
    "reloaded into it; or, where the reward stands still, updates that rounding swallows (bfloat16 weights)"
)


def _vanished(history: History) -> Evidence | None:
    values = history.kl(3)
    least = min(values[:-1], default=0.0)
    if history.settings.moving_reference or len(values) < 3 or least < REFERENCE_DIFFERS.value:
        return None
    if values[-1] > FELL.value * least or not _stands_out(history.kl(SPIKE_MEMORY)[:-1], values[-1]):
        return None
    return Evidence(
        f"{history.kl_name()} fell from {number(values[-2])} to {number(values[-1])} nats per token from one logged "
        "step to the next: updates hardly take a policy back to its reference"
    )


def is_reset(history: History) -> bool:
    """Whether a record shows a reference that becomes the policy again and again, after equally many steps."""
    falls = [view.step for view in history.replay() if _vanished(view)]
    gaps = [after - before for before, after in pairwise([min((r.step for r in history.rows), default=0), *falls])]
    if len(gaps) < 2 or max(gaps[1:]) - min(gaps[1:]) > 1:
        return False
    return abs(gaps[0] - gaps[1]) <= 1 or (len(gaps) > 2 and gaps[0] < gaps[1])  # a record may begin between two


def _kl_to_the_start(history: History) -> str:
    """The KL to the model that training started from, where the run logs it; else empty."""
    if history.settings.moving_reference:
        return "kl/k3_original" if "kl/k3_original" in history.latest else ""
    return "" if history.settings.other_reference else history.kl_name()


def _first_kl(history: History, names: Sequence[str]) -> tuple[str, float]:
    """The first of these metrics that was logged before the first update, while that is the latest step; else 0."""
    starts = len(history.rows) == 1 and history.rows[0].step <= 1 and not history.settings.steps_counted
    first = history.latest if starts else {}
    return next(((name, first[name]) for name in names if name in first), ("", 0.0))


def kl_far(history: History) -> Evidence | None:
    """Finds a policy that is far from its reference, however it got there."""
    kl, length = _settled(history, FAR_STEPS), history.last("length/mean", FAR_STEPS)
    if kl is None or not length or kl <= FAR.value or kl * fmean(length) <= FAR_COMPLETION.value:
        return None
    whole = number(kl * fmean(length))
    text = f"the KL is {number(kl)} nats per token, {whole} per completion, {MIDDLE}"
    return Evidence(text, blame(history, history.step), _why_far(history))


def kl_growing(history: History) -> Evidence | None:
    """Finds a KL that goes on growing although the reward does not."""
    name, (kl, reward) = history.kl_name(), history.together(30, history.kl_name(), "reward")
    if len(kl) < 30 or fmean(kl[20:]) < GROWING_FLOOR:
        return None
    parts = [kl[:10], kl[10:20], kl[20:]]
    for before, after in pairwise(parts):
        if fmean(after) < GROWING.value * fmean(before) or not is_apart(before, after, errors=3):
            return None
    early, late = reward[:10], reward[20:]
    if fmean(late) > fmean(early) and is_apart(early, late, errors=1):
        return None
    return Evidence(
        f"{name} grew from {number(fmean(parts[0]))} to {number(fmean(parts[2]))} nats per token, and the reward went "
        f"from {number(fmean(early))} to {number(fmean(late))} (means of 10 values, 20 apart)",
        causes=_why_far(history),
    )


def _why_far(history: History) -> list[str]:
    return causes.likely_causes(
        history, causes.learning_rate, causes.weak_kl, causes.stale_sampler, causes.pays_for_length, causes.repeats
    )


def kl_high(history: History) -> Evidence | None:
    """Finds a policy that is far from its reference."""
    kl = _settled(history, 5)
    return Evidence(f"the KL is {number(kl)} nats per token, {MIDDLE}") if kl is not None and kl > HIGH.value else None


def kl_low(history: History) -> Evidence | None:
    """Finds a policy that is still near to its reference after the first steps."""
    kl = _settled(history, 20)
    return (
        Evidence(f"the KL is {number(kl)} nats per token, {MIDDLE}") if kl is not None and abs(kl) < LOW.value else None
    )


MIDDLE = "mean of the last 5 but the largest"


def _settled(history: History, steps: int) -> float | None:
    """The mean KL of the last 5 steps without the largest, once there are so many: one outlier says nothing."""
    values = history.kl(5) if len(history.rows) >= steps else []
    return fmean(sorted(values)[:-1]) if len(values) == 5 else None


RUNAWAY_WINDOW = 10
RUNAWAY = Limit(
    value=30,
    unit=f"times the first beta, while beta times the KL per completion outweighs the reward, {RUNAWAY_WINDOW} steps",
    source="klamp's choice; seen: from 0.03 to 32 at a target of 0.08 nats per token, the score from 99 to 87",
)
INERT_STEPS = 20
INERT = Limit(
    value=0.005,
    unit=f"of the reward's pull, {INERT_STEPS} steps, once the KL is above 0.05 nats per completion; or a clip whose "
    "budget no completion exceeded in any of them",
    source="klamp's choice: the KL's pull is price sqrt(2 KL) / s, 1 at the optimum (s: the reward's standard "
    "deviation within groups)",
)
INERT_KL = 0.05
DOMINATES_STEPS = 10
DOMINATES = Limit(
    value=0.02,
    unit=f"nats per completion: the KL (s / price)^2 / 2 of the optimum is below it, {DOMINATES_STEPS} steps",
    source="to second order, see docs/where-it-ends.md: the reward can rise by s^2 / price at most, a fifth of s",
)


def beta_runaway(history: History) -> Evidence | None:
    """Finds a controller that raised beta until the KL costs more than the reward gives."""
    betas, prices, kls, rewards = history.together(RUNAWAY_WINDOW, "beta", "beta/price", "kl/k3_sequence", "reward")
    start = next((value for value in history.first("beta", EARLY) if value > 0), None)
    if len(betas) < RUNAWAY_WINDOW or start is None:
        return None
    cost, gain = fmean(price * kl for price, kl in zip(prices, kls, strict=True)), fmean(map(abs, rewards))
    if fmean(betas) < RUNAWAY.value * start or cost <= gain:
        return None
    return Evidence(
        f"beta went from {number(start)} to {number(fmean(betas))}; the KL of a completion costs {number(cost)} of "
        f"reward, and its reward is {number(gain)} in size (means of {RUNAWAY_WINDOW} values)"
    )


def kl_inert(history: History) -> Evidence | None:
    """Finds a KL that is paid for and does nothing: its pull is lost beside the reward's, or its clip never opens."""
    if len(history.rows) < INERT_STEPS or not history.penalized or history.settings.target_kl is not None:
        return None
    over = history.last("kl/over_budget", INERT_STEPS)
    if len(over) == INERT_STEPS and max(over) == 0 and not any(history.last("kl/after_clip", INERT_STEPS)):
        budget, before = history.last("kl/budget", 1), history.last("kl/before_clip", INERT_STEPS)
        return Evidence(
            f"in {INERT_STEPS} steps no completion exceeded the clip's budget"
            + (f" of {number(budget[0])} nats" if budget else "")
            + (f"; their mean KL was {number(fmean(before))}" if before else "")
            + ": the KL is 0 in the loss"
        )
    name = "kl/exact_sequence" if "kl/exact_sequence" in history.latest else "kl/k3_sequence"
    kl, pull = history.last(name, INERT_STEPS), kl_pull(history, INERT_STEPS)
    if len(kl) < INERT_STEPS or fmean(kl) < INERT_KL or pull is None or pull >= INERT.value:
        return None
    price = fmean(history.last("beta/price", INERT_STEPS))
    return Evidence(
        f"the KL pulls with {100 * pull:.2g} % of the reward's strength, means of {INERT_STEPS}: {number(price)} of "
        f"reward per nat of a completion, whose KL is {number(fmean(kl))} nats"
    )


def kl_dominates(history: History) -> Evidence | None:
    """Finds a beta at which even the optimum stays at the reference."""
    free = history.latest.get("kl/budget", 0.0) >= DOMINATES.value  # what lies below a clip's budget costs nothing
    prices = [] if free or not history.penalized else history.last("beta/price", DOMINATES_STEPS)
    return outweighs(history, prices, "reference")


def outweighs(history: History, prices: Sequence[float], anchor: str) -> Evidence | None:
    """Finds prices, of the last steps, at which even the optimum stays at an anchor."""
    spread = spread_within_groups(history, DOMINATES_STEPS)
    if len(prices) < DOMINATES_STEPS or spread is None or min(prices) <= 0:
        return None
    price = fmean(prices)
    optimum = (spread / price) * (spread / price) / 2
    if optimum >= DOMINATES.value:
        return None
    return Evidence(
        f"a nat of a completion costs {number(price)} of reward, and rewards differ by {number(spread)} within their "
        f"groups: the best policy is about {number(optimum)} nats per completion from the {anchor}, and earns about "
        f"{number(spread * spread / price)} more than it"
    )
