"""The rules about what the reward makes of a policy: collapse, length, repetition, nothing left to learn."""

from __future__ import annotations

from statistics import fmean

from klamp.diagnostics import causes
from klamp.diagnostics.alarm import Evidence, Limit, is_apart, number
from klamp.diagnostics.history import EARLY, History

COLLAPSE_WINDOW, COLLAPSE_MEMORY = 5, 100
COLLAPSE = Limit(
    value=0.3,
    unit=f"of the best mean of {COLLAPSE_WINDOW} steps among the {COLLAPSE_MEMORY} before, which is lost; and as much "
    "as half of the reward's standard deviation within groups, and 4 standard errors",
    source="klamp's choice; seen: .67 to .004 at a learning rate a hundred times too high",
)
LONGER = Limit(
    value=1.5,
    unit="times the length of the first 10 steps, mean of the last 10, by more than 4 standard errors",
    source="klamp's choice",
)
PAYS = Limit(
    value=causes.PAYS,
    unit="correlation of reward and length within groups, mean of 10 steps",
    source="klamp's choice: right answers are no longer than wrong ones, mostly shorter",
)
REPEATED = Limit(
    value=causes.REPEATED,
    unit="of the tokens stand in a pair of tokens that was in the completion before, mean of 5 steps",
    source="klamp's choice; 'majestic majestic majestic' has .9, a sentence of 24 tokens hardly any",
)
MORE_REPEATED = Limit(value=0.2, unit="more of them than in the first 5 steps", source="a task may want repetition")
SATURATED_STEPS = 20
SATURATED = Limit(
    value=0.99,
    unit=f"of the groups have equal rewards, mean of {SATURATED_STEPS} steps",
    source="klamp's choice: 99 % right in groups of 8 leaves 92 %",
)
TRUNCATED = Limit(value=0.25, unit="of the completions, mean over 5 steps", source="klamp's choice")
USELESS = 0.6
MORE_TRUNCATED = Limit(
    value=0.1,
    unit="more of them than in the first 5 steps, in which there were fewer; or as many from the start, and equal "
    f"rewards in {100 * USELESS:.0f} % of the groups; unless the reward pays for length",
    source="answers that are cut by design, and rewarded all the same, are no fault",
)


def reward_collapse(history: History) -> Evidence | None:
    """Finds a reward that has fallen far below its best."""
    now = history.last("reward", COLLAPSE_WINDOW)
    before = history.last("reward", COLLAPSE_MEMORY, before=COLLAPSE_WINDOW)
    if len(now) < COLLAPSE_WINDOW or len(before) < COLLAPSE_WINDOW:
        return None
    windows = [before[i : i + COLLAPSE_WINDOW] for i in range(len(before) - COLLAPSE_WINDOW + 1)]
    best = max(windows, key=fmean)
    fallen = fmean(best) - fmean(now)
    spread = history.last("reward_std", 1 + len(before))
    least = max(COLLAPSE.value * abs(fmean(best)), max(spread, default=0.0) / 2)
    if fallen <= least or not is_apart(best, now, errors=4):
        return None
    return Evidence(
        f"the reward fell from {number(fmean(best))} to {number(fmean(now))}, means of {COLLAPSE_WINDOW} steps",
        causes=causes.likely_causes(
            history, causes.learning_rate, causes.stale_sampler, causes.weak_kl, causes.repeats
        ),
    )


def length_exploited(history: History) -> Evidence | None:
    """Finds completions that grow because the reward pays for length."""
    start, now = history.first("length/mean", 10), history.last("length/mean", 10)
    pays = history.last("length/reward_correlation", 10)
    if len(history.rows) < 20 or min(map(len, (start, now, pays))) < 10:
        return None
    if fmean(now) < LONGER.value * fmean(start) or not is_apart(start, now, errors=4) or fmean(pays) < PAYS.value:
        return None
    return Evidence(
        f"completions grew from {number(fmean(start))} to {number(fmean(now))} tokens, and within groups the longer "
        f"ones earn more (correlation {fmean(pays):.2f} over 10 steps)",
        causes=causes.likely_causes(history, causes.pays_for_length, causes.repeats, causes.weak_kl),
    )


def repetition(history: History) -> Evidence | None:
    """Finds completions that say the same words over and over."""
    start, now = history.first("length/repeated", 5), history.last("length/repeated", 5)
    if min(len(start), len(now)) < 5 or fmean(now) < REPEATED.value:
        return None
    if fmean(now) - fmean(start) < MORE_REPEATED.value:
        return None
    entropy = history.first("policy/entropy", 5), history.last("policy/entropy", 5)
    lost = f"; the entropy went from {number(fmean(entropy[0]))} to {number(fmean(entropy[1]))}" if all(entropy) else ""
    return Evidence(
        f"{100 * fmean(now):.0f} % of the tokens stand in a pair that was in their completion before, "
        f"{100 * fmean(start):.0f} % in the first steps{lost}",
        causes=causes.likely_causes(history, causes.pays_for_length, causes.weak_kl, causes.learning_rate),
    )


def saturated(history: History) -> Evidence | None:
    """Finds a run in which no group has a spread of rewards any more."""
    values = history.last("groups/saturated", SATURATED_STEPS)
    if len(values) < SATURATED_STEPS or fmean(values) < SATURATED.value:
        return None
    rewards = history.last("reward", SATURATED_STEPS)
    at = f" at {number(fmean(rewards))}" if rewards else ""
    entropy = history.last("policy/entropy", 5)
    certain = f", the entropy is {number(fmean(entropy))} nats per token" if entropy else ""
    return Evidence(
        f"{100 * fmean(values):.3g} % of the groups of {SATURATED_STEPS} steps have equal rewards{at}{certain}",
        causes=[
            *_why_saturated(history, rewards),
            *causes.likely_causes(history, causes.repeats, causes.pays_for_length),
        ],
    )


def _why_saturated(history: History, rewards: list[float]) -> list[str]:
    if not rewards:
        return []
    best = max(history.first("reward", EARLY), default=0.0)
    if fmean(rewards) < best - COLLAPSE.value * abs(best):
        return [f"the reward was {number(best)} and is gone: look at the alarms before this one"]
    if abs(fmean(rewards)) < 0.02:
        return [
            "no completion earns anything: read some beside the reward function; take easier prompts, more completions "
            "per prompt, or a reward for parts of an answer"
        ]
    return ["every completion earns the same: the task is learned (end the run, or take harder prompts) or gamed"]


def truncated(history: History) -> Evidence | None:
    """Finds many completions that end at the length limit, where that is no part of the task."""
    start, now = history.first("length/truncated", 5), history.last("length/truncated", 5)
    pays = history.last("length/reward_correlation", 5)
    if len(now) < 5 or fmean(now) <= TRUNCATED.value or (pays and fmean(pays) >= PAYS.value):
        return None
    equal = history.first("groups/saturated", 5)
    useless = len(equal) == 5 and fmean(start) > TRUNCATED.value and fmean(equal) >= USELESS
    by_design = fmean(start) > TRUNCATED.value or fmean(now) - fmean(start) <= MORE_TRUNCATED.value
    if by_design and not useless:
        return None
    few = f", as from the start, where {100 * fmean(equal):.0f} % of the groups had equal rewards" if useless else ""
    earlier = few or f", {100 * fmean(start):.0f} % in the first"
    return Evidence(
        f"{100 * fmean(now):.0f} % of the completions were cut at the length limit over 5 steps{earlier}",
        causes=causes.likely_causes(history, causes.pays_for_length, causes.repeats),
    )
