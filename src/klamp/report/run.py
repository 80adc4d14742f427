"""A run as the report gets it: plain data, from whichever reader; and how the scores of runs are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from klamp.doctor.examine import Diagnosis
from klamp.doctor.history import History
from klamp.report.text import MINUS, MISSING, Read, count, reader, rounded

OURS = "klamp run"
"""The source of a run of klamp, whose scores belong to its tasks."""


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """A run as the report shows it: its diagnosed history, its configuration, its versions."""

    name: str
    """A short name, different from the other runs' names."""
    path: str
    group: str = ""
    """Runs of one group look alike in charts, as seeds of one configuration do; empty: it looks like no other."""
    diagnosis: Diagnosis
    said: Sequence[str] = ()
    """Its model, task, KL, day and duration in words, as far as known: the first line of the page."""
    outcome: Mapping[str, float] = field(default_factory=dict)
    """What was measured once after training on held-out prompts, such as `kl/reverse`, the exact KL(policy‖start)."""

    @property
    def history(self) -> History:
        """The record of the run."""
        return self.diagnosis.history

    @cached_property
    def read(self) -> Read:
        """The function that turns its tokens into text."""
        token_lists = (
            completion.tokens for completions in self.history.completions.values() for completion in completions
        )
        return reader(map(str, set[str]().union(*token_lists)))

    def curve(self, name: str) -> dict[float, float]:
        """The values of a metric, or of `eval/SKILL`: step -> value."""
        if name.startswith("eval/"):
            skill = name.removeprefix("eval/")
            rows = self.history.evaluations
            return {row.step: row.metrics[skill] for row in rows if skill in row.metrics}
        return {row.step: row.metrics[name] for row in self.history.rows if name in row.metrics}


def coverage(diagnosis: Diagnosis) -> str:
    """How many alarms were checked, and how many not, in words."""
    rest = f", {len(diagnosis.unchecked)} could not be" if diagnosis.unchecked else ""
    return f"{len(diagnosis.checked)} of {diagnosis.concerned} alarms were checked{rest}"


def judged(runs: Sequence[Diagnosis]) -> str:
    """How many alarms and notes rose in these runs, in words; a plain "no alarm" where the KL of each was looked at."""
    alarms = sum(len(run.failed()) for run in runs)
    notes = sum(len(run.findings) for run in runs) - alarms
    if all(run.empty for run in runs):
        return "nothing could be checked"
    blind = any(run.blind or run.empty for run in runs)
    sound = "cannot tell: no alarm in what was looked at" if blind else "no alarm"
    text = count(alarms, "alarm") if alarms else sound
    return f"{text}, {count(notes, 'note')}" if notes else text


def slots_of(runs: Sequence[ReportRun]) -> list[int]:
    """The number of each run's colour; runs of one group share it."""
    names = [run.group or f"run {number}" for number, run in enumerate(runs)]
    return [list(dict.fromkeys(names)).index(name) for name in names]


def skills_of(runs: Sequence[ReportRun]) -> list[str]:
    """The skills that were evaluated: those that are trained first, the others by name."""
    skills = {name for run in runs for row in run.history.evaluations for name in row.metrics}
    trained = {run.history.settings.rl_skill for run in runs}
    return sorted(skills, key=lambda name: (name not in trained, name))


@dataclass(frozen=True)
class ScoreFormat:
    """How scores are written."""

    points: bool
    """Whether as points of 100, else unchanged."""

    @classmethod
    def of(cls, runs: Sequence[ReportRun]) -> ScoreFormat:
        """The way that fits all scores of these runs; what another trainer evaluates may be no share of anything."""
        ours = all(run.history.source == OURS for run in runs)
        return cls(ours and cls.fitting(*(row.metrics for run in runs for row in run.history.evaluations)).points)

    @classmethod
    def fitting(cls, *scores: Mapping[str, float]) -> ScoreFormat:
        """The way that fits these scores: as points of 100 if all are between 0 and 1."""
        return cls(all(0 <= value <= 1 for by_skill in scores for value in by_skill.values()))

    @property
    def unit(self) -> str:
        """The unit of the written numbers."""
        return "points of 100" if self.points else "score"

    @property
    def decimals(self) -> int | None:
        """Decimals of the written numbers; None: as many as four digits need."""
        return 1 if self.points else None

    @property
    def full(self) -> tuple[float, ...]:
        """The values that an axis of scores has room for."""
        return (0.0, 100.0) if self.points else (0.0,)

    def scaled(self, value: float) -> float:
        """A score as a number in the unit."""
        return 100 * value if self.points else value

    def write(self, value: float | None) -> str:
        """A score as text."""
        return rounded(None if value is None else self.scaled(value), decimals=self.decimals)

    def change(self, before: float | None, after: float | None) -> str:
        """The change of a score as text, with its sign."""
        if before is None or after is None:
            return MISSING
        text = f"{100 * (after - before):+.1f}" if self.points else f"{after - before:+.4g}"
        return text.replace("-", MINUS)
