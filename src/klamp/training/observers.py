"""The hooks by which a run tells observers what happens, and the observer that lets every alarm examine the run.

The trainer itself prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.diagnostics.doctor import AlarmWatch, Finding
from klamp.diagnostics.history import Row, RunSettings, completion_of
from klamp.diagnostics.names import settings_of_run
from klamp.errors import TrainingStopped
from klamp.names import ALARMS_FILE
from klamp.tasks.base_model import Progress
from klamp.training.config import TrainConfig
from klamp.training.folders import COMPLETIONS, METRICS_FILE, each_readable, lines_of, lines_until, scores_of

SAID_ELSEWHERE = ("step-zero-kl",)
"""Alarms that the trainer words itself, as a caution; they are written down and can stop a run."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known of a run before its first step."""

    config: TrainConfig
    """The configuration in force."""
    output_dir: Path
    """The folder of the run."""
    start_step: int
    """0, or the step a resumed run continues from."""
    parameters: int
    """Parameters of the policy without those of an adapter."""
    trainable_parameters: int
    """The number of parameters that are trained."""
    reference: str
    """Where the reference comes from, in words; "none" at beta 0."""
    device: str
    """The device of the policy."""
    changes: str = ""
    """What a resume changed, in words."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run achieved."""

    output_dir: Path
    """The folder of the run."""
    steps: int
    """The number of steps that are done."""
    seconds: float
    """The time that this process took, in seconds."""
    rl_skill: str
    """The skill that was trained."""
    before: Mapping[str, float]
    """Skill -> score before training."""
    after: Mapping[str, float]
    """Skill -> score after training."""
    final_metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step."""


class Observer:
    """The hooks of a run, for a subclass to override."""

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Called while something slow happens before the run: `done` of `total`, with its loss where it has one."""

    def on_start(self, info: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when step `step` (from 1) is done; the metrics are described in `klamp.diagnostics.metrics`."""

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Called when the skills were evaluated after `step` steps: skill -> mean score."""

    def on_answers(self, step: int, rows: list[dict[str, object]]) -> None:
        """Called with some greedy answers of an evaluation."""

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        """Called with a sample of the step's completions."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint was written."""

    def on_alarm(self, finding: Finding) -> None:
        """Called when an alarm rose, once per alarm in a run; see `klamp.diagnostics.alarms`."""

    def on_warning(self, text: str) -> None:
        """Called with a caution: what the user should know, and what to do."""

    def on_end(self, summary: RunSummary) -> None:
        """Called when the run is over."""

    def close(self) -> None:
        """Called last, even after an error, and once only."""


def progress_of(observers: Sequence[Observer]) -> Progress:
    """What slow loading is told to: every observer."""

    def progress(what: str, done: int, total: int, loss: float | None) -> None:
        for observer in observers:
            observer.on_loading(what, done, total, loss)

    return progress


class AlarmObserver(Observer):
    """An observer that lets every alarm examine the run after each step and evaluation, and tells the others of it."""

    def __init__(
        self, tell: Callable[[Callable[[Observer], None]], None], *, rl_skill: str, stop_on: Sequence[str] = ()
    ) -> None:
        self.tell, self.rl_skill, self.stop_on = tell, rl_skill, tuple(stop_on)
        self.watch = AlarmWatch(RunSettings(), stop_on=stop_on)

    @property
    def stopped_by(self) -> Finding | None:
        """The alarm of stop_on that rose first."""
        return self.watch.stopped_by

    def on_start(self, info: RunInfo) -> None:
        """Keep the configuration, and take up what was seen and reported before a checkpoint."""
        settings = settings_of_run(info.config.flat(), rl_skill=self.rl_skill)
        self.watch = AlarmWatch(settings, told=names_in(info.output_dir / ALARMS_FILE), stop_on=self.stop_on)
        lines = lines_until(info.output_dir / METRICS_FILE, info.start_step) if info.start_step else []
        kept = lines_until(info.output_dir / COMPLETIONS, info.start_step) if info.start_step else []
        self.watch.keep(
            rows=[Row(step=row["step"], metrics=_numbers(row)) for row in lines if not scores_of(row)],
            evaluations=[Row(step=row["step"], metrics=scores) for row in lines if (scores := scores_of(row))],
            completions=each_readable(kept, lambda row: completion_of(row["step"], row)),
        )

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        """Keep the completions of the step, which come before its metrics."""
        self.watch.keep(completions=[completion_of(step, row) for row in rows])

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Examine the run with the metrics of this step."""
        self._report(self.watch.step(step, metrics))

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Examine the run with these scores."""
        self._report(self.watch.evaluation(step, scores))

    def _report(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.tell(lambda observer, finding=finding: observer.on_alarm(finding))

    def stop(self, step: int, max_steps: int) -> TrainingStopped:
        """The error that ends a run at an alarm of stop_on."""
        finding = self.stopped_by
        assert finding is not None
        alarm, evidence = finding.alarm, finding.evidence
        return TrainingStopped(
            f"training was stopped after step {step} of {max_steps} by the alarm {alarm.name}: {alarm.text}",
            got=evidence.text,
            resumable=True,
            why=" ".join((*evidence.causes[:1], alarm.means, alarm.next_step)),
            fix="mend that and start again, or leave the name out of stop_on and continue with --resume",
        )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: x for name, x in row.items() if name != "step" and isinstance(x, int | float)}


def names_in(file: Path) -> set[str]:
    """The names of the alarms in an alarms.jsonl; none where the file does not exist."""
    return {row["name"] for row in lines_of(file) if isinstance(row.get("name"), str)}
