"""The columns of an ablation's table: how each number is read from a run's outcome, and its unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from klamp.ablation.outcome import Outcome

Better: TypeAlias = Literal["higher", "lower", "neither"]
Group: TypeAlias = Literal["skills", "distance", "run"]

GROUPS: dict[Group, str] = {
    "skills": "Skills",
    "distance": "Distance from the starting model",
    "run": "The runs",
}
"""Group -> heading: a table of all columns would be too wide to read."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table: a number of a run, with its title and unit."""

    name: str
    """The name of the column in JSON."""
    title: str
    """The heading of the column in tables for people."""
    unit: str
    """The unit of the values; "" where there is none."""
    better: Better
    """Whether higher values are better, lower ones, or neither."""
    group: Group
    """The group of columns (a table of its own) that it stands in."""
    read: Callable[[Outcome], float | None]
    """The function that reads the number from an outcome; it gives None where the run does not have it."""

    @property
    def heading(self) -> str:
        """The title and the unit, as they stand above the column."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def value(self, outcome: Outcome) -> float | None:
        """The number of a run; None where the run was not done or the number is not finite."""
        found = self.read(outcome) if outcome.state == "done" else None
        return found if found is not None and math.isfinite(found) else None


def rl_after(outcome: Outcome) -> float | None:
    """The score of the trained skill after training."""
    return outcome.after.get(outcome.rl_skill)


def rl_gain(outcome: Outcome) -> float | None:
    """The score of the trained skill after training, minus that before."""
    after, before = rl_after(outcome), outcome.before.get(outcome.rl_skill)
    return None if after is None or before is None else after - before


def retained_skills(outcome: Outcome) -> tuple[str, ...]:
    """The skills that were not trained, and were measured before and after."""
    return tuple(skill for skill in outcome.after if skill != outcome.rl_skill and skill in outcome.before)


def retained_after(outcome: Outcome) -> float | None:
    """The mean score of the skills that were not trained, after training."""
    return _mean(outcome.after[skill] for skill in retained_skills(outcome))


def retained_before(outcome: Outcome) -> float | None:
    """The mean score of the skills that were not trained, before training."""
    return _mean(outcome.before[skill] for skill in retained_skills(outcome))


def retained_loss(outcome: Outcome) -> float | None:
    """How much the mean score of the skills that were not trained fell; positive where something was forgotten."""
    return _mean(outcome.before[skill] - outcome.after[skill] for skill in retained_skills(outcome))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _number(name: str, title: str, unit: str, group: Group, better: Better = "neither") -> Column:
    return Column(name=name, title=title, unit=unit, better=better, group=group, read=lambda o: o.numbers.get(name))


COLUMNS: tuple[Column, ...] = (
    Column(name="rl/after", title="RL skill", unit="score", better="higher", group="skills", read=rl_after),
    Column(name="rl/gain", title="RL gain", unit="score", better="higher", group="skills", read=rl_gain),
    Column(
        name="retained/after",
        title="retained skills",
        unit="mean score",
        better="higher",
        group="skills",
        read=retained_after,
    ),
    Column(
        name="retained/loss",
        title="forgotten",
        unit="mean score",
        better="lower",
        group="skills",
        read=retained_loss,
    ),
    _number("reward", "reward", "", "skills", "higher"),
    _number("kl/reverse", "KL(policy‖start)", "nats/token", "distance"),
    _number("kl/reverse_sequence", "KL(policy‖start)", "nats/sequence", "distance"),
    _number("kl/forward", "KL(start‖policy)", "nats/token", "distance"),
    _number("kl/forward_sequence", "KL(start‖policy)", "nats/sequence", "distance"),
    _number("kl_retained/reverse", "KL(policy‖start), retained prompts", "nats/token", "distance"),
    _number("kl_retained/forward", "KL(start‖policy), retained prompts", "nats/token", "distance"),
    _number("length", "length", "tokens", "run"),
    _number("entropy", "entropy", "nats/token", "run"),
    _number("price", "price of KL", "reward/nat, per completion", "run"),
    _number("seconds", "wall time", "s", "run"),
)
"""All columns, in the order of the tables."""

BY_NAME = {column.name: column for column in COLUMNS}
"""Name of a column -> the column."""
