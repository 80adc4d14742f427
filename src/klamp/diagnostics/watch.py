"""Lets every alarm look at a run while it happens, in any trainer: each alarm is told once, and may stop the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from klamp.diagnostics.alarm import Alarm, Evidence
from klamp.diagnostics.alarms import ALARMS, check_names
from klamp.diagnostics.doctor import Finding
from klamp.diagnostics.history import EARLY, Completion, History, Row, Settings

ALARMS_FILE = "alarms.jsonl"
"""The file that alarms of a run are written to as they rise, one `Finding.record` a line."""
LATE = 150
"""Steps at the end of a run (at its beginning `EARLY`) that are kept: no rule looks at more."""


class AlarmWatch:
    """A run under way, with the alarms that rose in it.

    Args:
        settings: what is known of the run's configuration.
        told: names of alarms that were told before, as before a checkpoint.
        stop_on: names of alarms that are to end the run.

    Raises:
        UnknownNameError: stop_on has a name that no alarm has.
    """

    def __init__(self, settings: Settings, *, told: Collection[str] = (), stop_on: Sequence[str] = ()) -> None:
        check_names(stop_on)
        self.history = History(settings=settings)
        self.told, self.stop_on = set(told), tuple(stop_on)
        self.stopped_by: Finding | None = None

    def keep(
        self,
        *,
        rows: Iterable[Row] = (),
        evaluations: Iterable[Row] = (),
        completions: Iterable[Completion] = (),
    ) -> None:
        """Take up what is known of the run and look at nothing yet: what came before a checkpoint, or before a step.

        Args:
            rows: metrics of steps.
            evaluations: scores.
            completions: of steps, which come before their metrics.
        """
        self.history.rows.extend(rows)
        del self.history.rows[EARLY:-LATE]
        self.history.evaluations.extend(evaluations)
        self.history.add_completions(list(completions))
        self.history.forget_completions()

    def step(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """The alarms that rise with the metrics of a step and were not told before."""
        self.keep(rows=[Row(step=step, metrics=metrics)])
        return list(self._look(step))

    def evaluation(self, step: int, scores: Mapping[str, float]) -> list[Finding]:
        """The alarms that rise with the scores of an evaluation and were not told before."""
        self.keep(evaluations=[Row(step=step, metrics=scores)])
        return list(self._look(step))

    def _look(self, step: int) -> Iterator[Finding]:
        for name, alarm in ALARMS.items():
            evidence = alarm.rule(self.history)
            if evidence is None:
                continue
            finding = _finding(alarm, step, evidence)
            if name in self.stop_on and self.stopped_by is None:
                self.stopped_by = finding
            if name not in self.told:
                self.told.add(name)
                yield finding


def _finding(alarm: Alarm, step: int, evidence: Evidence) -> Finding:
    return Finding(alarm=alarm, first_step=step, last_step=step, steps=1, evidence=evidence)
