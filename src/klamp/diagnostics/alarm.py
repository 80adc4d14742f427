"""The types of an alarm and of what it finds, and the arithmetic that the rules share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal, TypeAlias

from klamp.diagnostics.history import History, Row

Level: TypeAlias = Literal["alarm", "note"]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A threshold of an alarm: a number, its unit, and where it comes from."""

    value: float
    """The number itself."""
    unit: str
    """The unit of the number."""
    source: str
    """Where the number comes from."""


@dataclass(frozen=True, kw_only=True)
class Blamed:
    """A token that has a large part in a KL."""

    step: int
    """The step that it was sampled in."""
    completion: int
    """The number of its completion among those that were written in the step, from 0."""
    position: int
    """Its place among the completion's tokens, from 0."""
    token: str
    """The token as text, or its id."""
    policy_logprob: float
    """Its log-probability under the policy, in nats."""
    other_logprob: float
    """Its log-probability under the reference (for a sampler mismatch, under the sampler), in nats."""
    share: float
    """Its share of the k3 of all tokens that were written in the step, equal ones counted with it."""
    times: int = 1
    """In how many of the completions it stands at this place with these log-probabilities."""


@dataclass(frozen=True)
class Evidence:
    """What a rule found wrong in a run: a sentence, and tokens to blame."""

    text: str
    """One sentence with the numbers."""
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
    """What it finds, in a few words."""
    means: str
    """What usually causes it."""
    next_step: str
    """What to do."""
    rule: Rule
    """The function that looks for it in a run."""
    needs: Sequence[str]
    """What a record must hold: metrics (`a|b`: one of them), `completions`, `sampler_logprobs` in them (or what else
    says which tokens the model wrote), `evaluations`, `settings.NAME`."""
    limits: Sequence[Limit]
    """The thresholds that it uses."""
    later: Callable[[History, Evidence, Sequence[Row]], Evidence] | None = None
    """What the logged steps after it say of what was seen; asked in a record that has some."""
    level: Level = "alarm"
    """`note`: information, which fails no check unless it is asked to."""


def number(value: float) -> str:
    """A number with three significant digits, as text."""
    return f"{value:.3g}"


def is_apart(a: Sequence[float], b: Sequence[float], *, errors: float) -> bool:
    """Whether the means of two stretches of a curve differ by more than so many standard errors."""
    if min(len(a), len(b)) < 2:
        return False
    error = math.hypot(*(noise(x) / math.sqrt(len(x)) for x in (a, b)))
    return abs(fmean(a) - fmean(b)) > errors * error


def noise(*stretches: Sequence[float]) -> float:
    """The standard deviation of a curve around its own trend, from the differences of neighbours in these stretches."""
    return math.sqrt(fmean((x - y) ** 2 for values in stretches for x, y in pairwise(values)) / 2)
