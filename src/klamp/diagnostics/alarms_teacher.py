"""The alarms about a teacher: whether it scores, and whether the KL to it does anything and falls."""

from __future__ import annotations

import math
from statistics import fmean

from klamp.diagnostics.alarm import Evidence, Limit, alarm, is_apart, least_and_most, number
from klamp.diagnostics.alarms_kl import STEP_ZERO
from klamp.diagnostics.history import History

KL = "teacher/kl"
SETTLED = 5
UNSCORED = Limit(0.1, f"of the trained tokens, mean of {SETTLED} steps")
CONSTANT_TOKENS, CONSTANT_POLICY = 20, 0.1
CONSTANT = Limit(
    1e-4, "nats between the largest and the smallest of a step, 20 tokens or more; the policy's differ by 0.1"
)
REACH_STEPS, REACH_FLOOR = 50, 0.05
REACHED = Limit(
    0.9,
    f"of the KL of the first 10 steps is still there in the last 10, after {REACH_STEPS} steps without a reward, and "
    f"above {REACH_FLOOR} nats per token (digits fall to an eighth in 30 steps)",
)
STILL = Limit(3, "steps in a row at exactly 0, or without a KL of the teacher that is configured")
NO_PART = 10


@alarm("teacher-silent", needs=("teacher/unscored",), limits=(UNSCORED, CONSTANT))
def silent(history: History) -> Evidence | None:
    """The teacher gives many tokens no number, or all the same one.

    The teacher's server fails or truncates, its numbers are lost on the way, or they are placeholders.

    Ask the teacher for one completion by hand.
    """
    for name in _each(history, "teacher/unscored"):
        for count in (SETTLED, 4 * SETTLED):
            values = history.last(name, count)
            if len(values) == count and least_and_most(values)[0] > UNSCORED.value:
                return Evidence(f"{fmean(values):.0%} of the trained tokens have no number of the teacher's ({name})")
    return _constant(history)


@alarm("teacher-not-reached", needs=(KL, "teacher/coef"), limits=(REACHED,))
def not_reached(history: History) -> Evidence | None:
    """The policy does not come nearer to its teacher.

    Mostly the learning rate is too low, the policy is too small, or the numbers belong to other tokens.

    Score one completion with teacher_model set to the policy itself: the KL must be 0.
    """
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


@alarm("teacher-inert", needs=(f"{KL}|settings.teacher_coef",), limits=(STILL,))
def inert(history: History) -> Evidence | None:
    """The teacher does nothing.

    The teacher is the policy itself, or its KL is not in the loss.

    Check the path of the teacher, its adapter, and whether the KL to it is added to the loss.
    """
    return _absent(history) or _still(history) or _not_in_loss(history)


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


def _not_in_loss(history: History) -> Evidence | None:
    parts, coefficients = (history.last(name, NO_PART) for name in ("train/teacher_penalty", "teacher/coef"))
    if len(parts) < NO_PART or any(parts) or min(coefficients, default=0.0) <= 0:
        return None
    kl = history.last(KL, NO_PART)
    if not kl or fmean(kl) <= STEP_ZERO.value:
        return None
    return Evidence(f"train/teacher_penalty is 0 in {NO_PART} values, and {KL} {number(fmean(kl))} nats per token")


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
