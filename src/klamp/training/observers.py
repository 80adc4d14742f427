"""The hooks by which a run tells observers what happens; the trainer itself prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klamp.diagnostics.doctor import Finding
from klamp.tasks.cache import Progress
from klamp.training.config import TrainConfig


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
    """Parameters of the policy without those of an adapter; 0 where a service does not say."""
    trainable_parameters: int
    """The number of parameters that are trained."""
    reference: str
    """Where the reference comes from, in words; "none" at beta 0."""
    device: str
    """The device of the policy."""
    processes: int
    """Number of processes."""


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
    """The hooks of a run, for a subclass to override; called on the main process only."""

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
