"""The outcome of a run: its file, and the numbers that the table reads from it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from klamp.ablation.plan import Run, run_folder
from klamp.errors import DataError
from klamp.files import json_of
from klamp.training.folders import write_whole

OUTCOME = "outcome.json"
"""The file in the folder of a run that is done or has failed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one run: done or failed, its numbers, its scores."""

    run: str
    arm: str
    seed: int
    values: Mapping[str, Any] = field(default_factory=dict)
    state: Literal["done", "failed"] = "done"
    error: str = ""
    """Why it failed; the first line says what happened."""
    rl_skill: str = ""
    """The trained skill; the others are the retained ones."""
    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    """Skill -> greedy score on held-out prompts, before and after training."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of `klamp.ablation.measure`, `beta` and `price` of the last step, `seconds` of all training steps."""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome into a run's folder, completely or not at all."""
    write_whole(folder / OUTCOME, json.dumps(asdict(outcome), indent=2))


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome from a run's folder; None if the run is neither done nor failed, a DataError if damaged."""
    file = folder / OUTCOME
    if not file.exists():
        return None
    try:
        outcome = Outcome(**json_of(file.read_text(encoding="utf-8")))
        for scores in (outcome.before, outcome.after, outcome.numbers):
            sum(scores.values(), 0.0)  # a TypeError if one is no number
        if not (isinstance(outcome.arm, str) and isinstance(outcome.seed, int)):
            raise TypeError(f"arm {outcome.arm!r}, seed {outcome.seed!r}")
        return outcome
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            "the outcome of a run cannot be read",
            got=str(file),
            why=f"{type(error).__name__}: {error}",
            fix="delete that file; the same `klamp ablate` command then makes it again",
        ) from error


def is_done(folder: Path, run: Run) -> bool:
    """Whether a run in the folder of an ablation is done; a failed run is not."""
    outcome = read_outcome(run_folder(folder, run))
    return outcome is not None and outcome.state == "done"


def failed(run: Run, error: str) -> Outcome:
    """The outcome of a run that failed; the first line of the error says what happened."""
    return Outcome(run=run.name, arm=run.arm.name, seed=run.seed, values=run.arm.values, state="failed", error=error)


def retained_skills(outcome: Outcome) -> tuple[str, ...]:
    """The skills that were not trained, with a score before and after."""
    return tuple(skill for skill in outcome.after if skill != outcome.rl_skill and skill in outcome.before)


def retained(outcome: Outcome, scores: Mapping[str, float]) -> float | None:
    """The mean score (`outcome.before` or `outcome.after`) of the skills that were not trained; None without any."""
    skills = retained_skills(outcome)
    return sum(scores[skill] for skill in skills) / len(skills) if skills else None


def columns(outcome: Outcome) -> dict[str, float]:
    """Column -> number of a run; without numbers that are missing or not finite, and none of a run that failed."""
    scores = {"rl/after": outcome.after.get(outcome.rl_skill), "retained/after": retained(outcome, outcome.after)}
    values = {**scores, **outcome.numbers} if outcome.state == "done" else {}
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
