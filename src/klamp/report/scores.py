"""Scores of skills as the page writes them: as points of 100 where all lie between 0 and 1, as in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from klamp.report.numerals import MINUS, MISSING, rounded
from klamp.report.run import ReportRun


@dataclass(frozen=True)
class Scores:
    """How scores are written."""

    points: bool
    """Whether as points of 100, else as they are."""

    @classmethod
    def of(cls, runs: Sequence[ReportRun]) -> Scores:
        """The way that fits all scores of these runs."""
        found: list[Mapping[str, float]] = [each for run in runs for each in (run.before, run.after)]
        found += [row.metrics for run in runs for row in run.history.evaluations]
        return cls(all(0 <= value <= 1 for scores in found for value in scores.values()))

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
