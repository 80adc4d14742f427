"""The outcome of a run of an ablation: the file that holds it, and the numbers of a table that are read from it."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from klamp.ablation.plan import Run, run_folder
from klamp.diagnostics.doctor import ALARMS_FILE
from klamp.diagnostics.history import LARGEST
from klamp.errors import DataError
from klamp.tasks.files import json_of
from klamp.tasks.paths import with_end
from klamp.training.folders import (
    ANSWERS,
    CAUTIONS,
    COMPLETIONS,
    CONFIG,
    METRICS_FILE,
    SUMMARY,
    VERSIONS,
    write_whole,
)

OUTCOME = "outcome.json"
"""The file in a run's folder; it is there once the run is done, or has failed."""

KEPT = (CONFIG, VERSIONS, METRICS_FILE, COMPLETIONS, ANSWERS, ALARMS_FILE, CAUTIONS, SUMMARY)
"""The small files of a run, which an ablation keeps wherever the run was done."""

OutcomeState: TypeAlias = Literal["done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to: done or failed, its numbers, its scores.

    The numbers that are measured (`klamp.ablation.measure`) are taken on held-out prompts with the same draws in every
    run, against the model that training started from.
    """

    run: str
    """The name of the run, which is that of its folder."""
    arm: str
    """The name of its arm."""
    seed: int
    """The seed of the run."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value that the arm sets."""
    state: OutcomeState = "done"
    """Whether it was done or failed; of a failed run the reason is in `error`, and the numbers are empty."""
    error: str = ""
    """Why it failed; the first line says what happened."""
    rl_skill: str = ""
    """The skill that was trained; the others are those to be retained."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Skill -> greedy score on held-out prompts before training."""
    after: Mapping[str, float] = field(default_factory=dict)
    """Skill -> greedy score on held-out prompts after training."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Name -> value: what `klamp.ablation.measure` found, `beta` and the `price` of KL in the last step, and the
    `seconds` of the training steps, without evaluation, saving and measuring."""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome into a run's folder; the file is there completely or not at all.

    Args:
        folder: of the run.
        outcome: what it came to.
    """
    write_whole(folder / OUTCOME, json.dumps(asdict(outcome), indent=2))


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome from a run's folder; None where the run is neither done nor failed.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / OUTCOME
    if not file.exists():
        return None
    try:
        return _checked(Outcome(**json_of(with_end(file).read_text(encoding="utf-8"))))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            "the outcome of a run cannot be read",
            got=str(file),
            why=f"{type(error).__name__}: {error}",
            fix="delete that file; the same `klamp ablate` command then makes it again",
        ) from error


def is_done(folder: Path, run: Run) -> bool:
    """Whether the run is done; a failed run is not, and is tried again.

    Args:
        folder: of the ablation.
        run: one of its runs.
    """
    outcome = read_outcome(run_folder(folder, run))
    return outcome is not None and outcome.state == "done"


def failed(run: Run, error: str) -> Outcome:
    """The outcome of a run that failed.

    Args:
        run: the run.
        error: why; the first line says what happened.
    """
    return Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, state="failed", error=error)


def _checked(outcome: Outcome) -> Outcome:
    """The outcome, if each of its fields is of its type, and its numbers can be added up.

    Raises:
        TypeError: names the first that is not.
    """
    kinds: dict[str, type] = {"seed": int, "values": dict, **dict.fromkeys(("before", "after", "numbers"), dict)}
    for name, value in vars(outcome).items():
        right = isinstance(value, kinds.get(name, str))
        if right and name in ("before", "after", "numbers"):
            right = all(isinstance(x, int | float) and not LARGEST < abs(x) < math.inf for x in value.values())
        if not right:
            raise TypeError(f"{name} is {reprlib.repr(value)}")
    return outcome


Group: TypeAlias = Literal["skills", "distance", "run"]

GROUPS: dict[Group, str] = {
    "skills": "Skills",
    "distance": "Distance from the starting model",
    "run": "The runs",
}
"""Group -> heading: a table of all columns would be too wide to read."""


@dataclass(frozen=True)
class TableColumn:
    """One column of the table: a number of a run, with its title and unit."""

    name: str
    """The name of the column in JSON."""
    title: str
    """The heading of the column in tables for people."""
    unit: str
    """The unit of the values; "" where there is none."""
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


def _number(name: str, title: str, unit: str, group: Group) -> TableColumn:
    return TableColumn(name, title, unit, group, lambda outcome: outcome.numbers.get(name))


COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("rl/after", "RL skill", "score", "skills", rl_after),
    TableColumn("rl/gain", "RL gain", "score", "skills", rl_gain),
    TableColumn("retained/after", "retained skills", "mean score", "skills", retained_after),
    TableColumn("retained/loss", "forgotten", "mean score", "skills", retained_loss),
    _number("reward", "reward", "", "skills"),
    _number("kl/reverse", "KL(policy‖start)", "nats/token", "distance"),
    _number("kl/reverse_sequence", "KL(policy‖start)", "nats/sequence", "distance"),
    _number("kl/forward", "KL(start‖policy)", "nats/token", "distance"),
    _number("kl/forward_sequence", "KL(start‖policy)", "nats/sequence", "distance"),
    _number("kl/teacher", "KL(policy‖teacher)", "nats/token", "distance"),
    _number("length", "length", "tokens", "run"),
    _number("entropy", "entropy", "nats/token", "run"),
    _number("beta", "beta", "last step", "run"),
    _number("price", "price of KL", "reward/nat, per completion", "run"),
    _number("seconds", "wall time", "s", "run"),
)
"""All columns, in the order of the tables."""

BY_NAME = {column.name: column for column in COLUMNS}
"""Name of a column -> the column."""
