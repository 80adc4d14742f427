"""The types of an alarm and of what it finds, and the arithmetic that the rules share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, TypeAlias

from klamp.doctor.history import History
from klamp.names import KL_NAMES

Level: TypeAlias = Literal["alarm", "note"]


@dataclass(frozen=True)
class Limit:
    """A threshold of an alarm."""

    value: float
    text: str
    """Its unit and what it applies to; where it comes from, in brackets."""


@dataclass(frozen=True)
class Blamed:
    """A token that has a large part in a KL."""

    step: int
    completion: int
    """The number of its completion among those that were written in the step, from 0."""
    position: int
    """Its place among the completion's tokens, from 0."""
    token: str
    """The token as text, or its id."""
    policy_logprob: float
    other_logprob: float
    """Its log-probability under the reference (for a sampler mismatch, under the sampler), in nats."""
    share: float
    """Its share of the k3 of all tokens that were written in the step, equal ones at its place counted with it."""


@dataclass(frozen=True)
class Evidence:
    """What a rule found wrong in a run: a sentence, and tokens to blame."""

    text: str
    tokens: Sequence[Blamed] = ()
    """The tokens to blame, the worst first."""
    causes: Sequence[str] = ()
    """What the run itself shows of why, with a remedy each; the likeliest first."""


Rule: TypeAlias = Callable[[History], Evidence | None]
"""Looks at a run as it stands after a step or an evaluation; None: nothing is wrong. Looks only at the last steps."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A named alarm: what it looks for, what that means, what to do."""

    name: str
    """The name that `--stop-on` and `--fail-on` take."""
    text: str
    means: str
    next_step: str
    rule: Rule
    needs: Sequence[str]
    """What a record must hold for the alarm to rise: metrics (`a|b`: one of them, `a+b`: both), `settings.NAME`, or a
    name of `CONTENTS` in `klamp.doctor.examine`."""
    steps: int = 1
    """In how many steps it must hold its metrics."""
    concerns: str = ""
    """The kind of run that can raise it, a name of `CONTENTS`; empty: every run."""
    limits: Sequence[Limit] = ()
    level: Level = "alarm"
    """`note`: information, which fails no check unless it is asked to."""


ALARMS: dict[str, Alarm] = {}
"""Name of an alarm -> the alarm; complete once `klamp.doctor.alarms` is imported."""
KL = "|".join(KL_NAMES)
"""What most alarms about the KL need: one of these metrics."""


def alarm(name: str, *, do: str, **fields: Any) -> Callable[[Rule], Rule]:
    """Make a rule an alarm with these fields; the first line of the rule's docstring says what it finds."""

    def register(rule: Rule) -> Rule:
        text = (rule.__doc__ or "").partition("\n")[0].rstrip(".")
        text = text if text[1:2].isupper() else text[:1].lower() + text[1:]
        ALARMS[name] = Alarm(name=name, text=text, rule=rule, next_step=do, **fields)
        return rule

    return register


def number(value: float) -> str:
    """A number with three significant digits, as text."""
    return f"{value:.3g}"


LONG = 20
"""Values of a curve after which a single jump adds little to the scatter."""


def is_apart(a: Sequence[float], b: Sequence[float], *, errors: float, curve: Sequence[float] = ()) -> bool:
    """Whether stretches of a curve differ by more than so many standard errors, by their scatter or a long curve's."""
    if min(len(a), len(b)) < 2:
        return False
    long_curve = curve if len(curve) >= LONG else ()
    error = math.hypot(*(noise(long_curve or x) / math.sqrt(len(x)) for x in (a, b)))
    return abs(fmean(a) - fmean(b)) > _of_few(errors, len(long_curve) or len(a) + len(b) - 1) * error


def least_and_most(values: Sequence[float]) -> tuple[float, float]:
    """Between which bounds the mean lies that a curve scatters around: 3 standard errors by its own scatter."""
    size = _of_few(3.0, len(values)) * noise(values) / math.sqrt(len(values))
    return fmean(values) - size, fmean(values) + size


def _of_few(errors: float, values: int) -> float:
    """The multiple of an error by few values that is as seldom: Student's t (Gaver and Kafadar, 1984)."""
    nu = max(2 * (values - 1) / 3, 2.0)  # degrees of freedom of the differences of neighbours
    return math.sqrt(nu * math.expm1(errors * errors * (nu - 1.5) / (nu - 1) ** 2))


def is_beyond(history: History, name: str, value: float, limit: float, *, steps: int = 1) -> bool:
    """Whether a mean of k1 or k3 lies beyond a limit by more than four standard errors."""
    if abs(value) <= limit:
        return False
    # log-ratios of variance 2 L have a k3 of mean L and std sqrt(2) L
    deviation = (2 * limit) ** 0.5 if name.endswith("k1") else 2**0.5 * limit
    return abs(value) > limit + 4 * deviation / (steps * count_tokens(history)) ** 0.5


FEW_TOKENS = 200
"""Tokens of a step if the record has no token counts and no lengths; few steps have fewer."""


def count_tokens(history: History) -> float:
    """The tokens of the latest step, or a lower bound from its record."""
    last, prompts = history.latest, history.settings.prompts or 1
    tokens = sum(len(completion.log_ratios()) for completion in history.written)
    tokens = tokens or last.get("length/mean", 0.0) * prompts
    if len(history.rows) == 1:  # a running total
        tokens = max(tokens, last.get("length/total", 0.0))
    return max(tokens, 1.0) if 0 < tokens < math.inf else FEW_TOKENS


def noise(*stretches: Sequence[float]) -> float:
    """The standard deviation of a curve around its own trend, from the differences of neighbours in these stretches."""
    steps = [x - y for values in stretches for x, y in pairwise(values)]
    return math.sqrt(fmean(x * x for x in steps) / 2) if steps else 0.0
