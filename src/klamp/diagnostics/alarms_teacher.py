"""The rules about a teacher: whether it scores, whether the KL to it pulls and gets anywhere, and whether it should be
followed. With several teachers those about the KL look at each. What each finding means: `alarms`.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

from klamp.diagnostics.alarm import Evidence, Limit, Rule, is_apart, least_and_most, number
from klamp.diagnostics.alarms_kl import DOMINATES_STEPS, INERT, INERT_KL, INERT_STEPS, STEP_ZERO, outweighs
from klamp.diagnostics.causes import spread_within_groups
from klamp.diagnostics.history import History

KL = "teacher/kl"
SETTLED = 5
UNSCORED = Limit(
    value=0.1, unit=f"of the trained tokens, mean of {SETTLED} steps", source="klamp's choice: gaps are seldom"
)
REACH_STEPS, REACH_FLOOR = 50, 0.05
REACHED = Limit(
    value=0.9,
    unit=f"of the KL of the first 10 steps is still there in the last 10, after {REACH_STEPS} steps without a reward, "
    f"and above {REACH_FLOOR} nats per token",
    source="klamp's choice: digits fall to an eighth in 30 steps",
)
INSIDE = Limit(value=0.5, unit=f"of the teacher's mass, mean of {SETTLED} steps", source="klamp's choice")
OVERLAP = Limit(
    value=0.05,
    unit="below the share of the 10 steps before, mean of 10, by 4 standard errors",
    source="klamp's choice: on the way to a teacher it rises",
)
SAME = Limit(
    value=STEP_ZERO.value,
    unit=f"nats per token, in the first {SETTLED} steps and the last",
    source="the size of the step-zero limit",
)
STILL = Limit(
    value=3,
    unit="steps in a row at exactly 0, or without a KL of the teacher that is configured",
    source="a policy that moves is not its teacher in any of them",
)
NO_PART = 10
WRONG = Limit(
    value=-0.3,
    unit="correlation with the reward, mean of 10 steps",
    source="klamp's choice; it is 0 where the teacher knows nothing of the task",
)
CONSTANT = Limit(
    value=1e-4,
    unit="nats between the largest and the smallest of a step, 20 tokens or more; the policy's differ by 0.1",
    source="the size of the step-zero limit",
)
CONSTANT_TOKENS, CONSTANT_POLICY = 20, 0.1
ENDS = Limit(
    value=0.05,
    unit=f"mean of {SETTLED} steps",
    source="klamp's choice: seen at .99 where both end alike; another end token has about 0",
)


def _mean(name: str, limit: Limit, text: str, *, steps: int = SETTLED, above: bool = False) -> Rule:
    """The rule that a metric's mean over some steps lies past its limit; the text has a place for it."""

    def rule(history: History) -> Evidence | None:
        for each, count in product(_each(history, name), (steps, 4 * steps)):
            values = history.last(each, count)
            least, most = least_and_most(values) if len(values) == count else (math.nan, math.nan)
            if least > limit.value if above else most < limit.value:
                return Evidence(text.format(fmean(values)) + f" ({each})" * (each != name))
        return None

    return rule


_gaps = _mean("teacher/unscored", UNSCORED, "{:.0%} of the trained tokens have no number of the teacher's", above=True)
_outside = _mean("teacher/teacher_mass", INSIDE, "the head holds {:.0%} of the teacher's mass")
ends_elsewhere = _mean("teacher/end", ENDS, "the teacher gives the policy's ends a probability of {:.3g}")
prefers_wrong = _mean(
    "teacher/reward_correlation",
    WRONG,
    "within groups the reward and what the teacher finds likelier than the policy correlate by {:.2f}",
    steps=10,
)


def silent(history: History) -> Evidence | None:
    """Finds a teacher that gives many tokens no number, or the same to all."""
    return _gaps(history) or _constant(history)


def not_reached(history: History) -> Evidence | None:
    """Finds a KL to a teacher that does not fall although nothing else is trained on."""
    coefficients = history.last("teacher/coef", 10)
    alone = "reward_std" not in history.latest and history.latest.get("beta", 0.0) <= 0
    if len(history.rows) < REACH_STEPS or not alone or min(coefficients, default=0.0) <= 0:
        return None
    for name in _each(history):
        first, last = history.first(name, 10), history.last(name, 10)
        high = len(first) >= SETTLED and fmean(last) > max(REACH_FLOOR, REACHED.value * fmean(first))
        if high and is_apart([x / 2 for x in first], last, errors=3):
            return Evidence(f"{name} was {number(fmean(first))} nats per token at first and is {number(fmean(last))}")
    return None


def head_misses(history: History) -> Evidence | None:
    """Finds a head that holds little of what the teacher would say, or shares less and less with the teacher's."""
    return _outside(history) or _overlap_falls(history)


def _overlap_falls(history: History) -> Evidence | None:
    for name in _each(history, "teacher/overlap_ratio"):
        values = history.last(name, 20)
        before, now = values[:10], values[10:]
        if len(values) == 20 and fmean(now) < fmean(before) - OVERLAP.value and is_apart(before, now, errors=4):
            return Evidence(f"{name} went from {number(fmean(before))} to {number(fmean(now))}, means of 10 values")
    return None


def inert(history: History) -> Evidence | None:
    """Finds a teacher that changes nothing: it is the policy, it is not in the loss, or the reward outweighs it."""
    return _absent(history) or _still(history) or _same(history) or _not_in_loss(history) or _outweighed(history)


def _absent(history: History) -> Evidence | None:
    rows, coefficient = history.rows[-int(STILL.value) :], history.settings.teacher_coef or 0.0
    if coefficient <= 0 or len(rows) < STILL.value or any(name.startswith(KL) for row in rows for name in row.metrics):
        return None
    text = f"a teacher is configured, with coefficient {number(coefficient)}; the last {len(rows)} steps have no {KL}"
    return Evidence(text)


def _still(history: History) -> Evidence | None:
    equal, coefficients = (history.last(name, int(STILL.value)) for name in ("groups/saturated", "teacher/coef"))
    if min(equal, default=0.0) == 1 or min(coefficients, default=1.0) <= 0:
        return None  # nothing need have moved
    for name in _each(history):
        seen = history.last(name, int(STILL.value))
        if len(seen) == STILL.value and not any(seen):
            return Evidence(f"the last {len(seen)} values of {name} are exactly 0, as if the teacher were the policy")
    return None


def _same(history: History) -> Evidence | None:
    for name in _each(history):
        seen = [*history.first(name, SETTLED), *history.last(name, SETTLED)]
        if len(seen) == 2 * SETTLED and max(map(abs, seen)) < SAME.value:
            return Evidence(
                f"{name} is {number(seen[-1])} nats per token, about 0 as at first, as if the teacher were the policy"
            )
    return None


def _not_in_loss(history: History) -> Evidence | None:
    parts, coefficients = (history.last(name, NO_PART) for name in ("train/teacher_penalty", "teacher/coef"))
    if len(parts) < NO_PART or any(parts) or min(coefficients, default=0.0) <= 0:
        return None
    kl = history.last(KL, NO_PART)
    if not kl or fmean(kl) <= SAME.value:
        return None
    return Evidence(f"train/teacher_penalty is 0 in {NO_PART} values, and {KL} {number(fmean(kl))} nats per token")


def _outweighed(history: History, steps: int = INERT_STEPS) -> Evidence | None:
    kl, length, prices = history.last(KL, steps), history.last("length/mean", steps), _prices(history, steps)
    spread = spread_within_groups(history, steps)
    if min(map(len, (kl, length, prices))) < steps or spread is None or min(prices) <= 0:
        return None
    whole = fmean(kl) * fmean(length)
    pull = fmean(prices) * (2 * max(whole, 0.0)) ** 0.5 / spread
    if whole < INERT_KL or pull >= INERT.value:
        return None
    return Evidence(f"the teacher pulls with {100 * pull:.2g} % of the reward's strength, means of {steps}")


def drowns_reward(history: History) -> Evidence | None:
    """Finds a coefficient at which even the optimum stays at the teacher."""
    return outweighs(history, _prices(history, DOMINATES_STEPS), "teacher")


def _prices(history: History, steps: int) -> list[float]:
    """Reward per nat of a completion; see `klamp.config.loss.price_of`, whose factor of the baseline is left out."""
    spread = spread_within_groups(history, steps) if history.settings.scale_rewards == "std" else None
    return [coefficient * (spread or 1.0) for coefficient in history.last("teacher/coef", steps)]


def _constant(history: History) -> Evidence | None:
    written = history.completions.get(history.step, ())
    pairs = [
        (policy, teacher)
        for each in written
        for policy, teacher, on in zip(each.policy, each.teacher or (), each.is_trained, strict=bool(each.teacher))
        if on and math.isfinite(policy) and math.isfinite(teacher)
    ]
    if len(pairs) < CONSTANT_TOKENS:
        return None
    policy, teacher = (max(values) - min(values) for values in zip(*pairs, strict=True))
    if teacher > CONSTANT.value or policy < CONSTANT_POLICY:
        return None
    return Evidence(f"all {len(pairs)} tokens have the log-probability {number(pairs[0][1])} under the teacher")


def _each(history: History, metric: str = KL) -> list[str]:
    """A metric of the teacher, and that of each of several, as the latest step has them."""
    return [name for name in history.latest if name.split(".", 1)[0] == metric]
