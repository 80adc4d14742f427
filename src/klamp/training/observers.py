"""What a run tells to whoever watches it. The trainer calls these hooks; it prints nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from klamp.diagnostics.doctor import Finding
from klamp.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known when a run begins."""

    config: TrainConfig
    """The configuration in force."""
    output_dir: Path
    """The folder of the run."""
    start_step: int
    """0, or the step a resumed run continues from."""
    parameters: int
    """Parameters of the policy; 0 where a service does not say."""
    trainable_parameters: int
    """Those that are trained."""
    reference: str
    """Where the reference comes from, in words; "none" at beta 0."""
    device: str
    """Device of the policy."""
    processes: int
    """Number of processes."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run amounts to."""

    output_dir: Path
    """The folder of the run."""
    steps: int
    """Steps done."""
    seconds: float
    """Wall time of this process."""
    rl_skill: str
    """The skill that was trained."""
    before: Mapping[str, float]
    """Skill -> score before training."""
    after: Mapping[str, float]
    """Skill -> score after training."""
    final_metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last step."""


class Observer:
    """Hooks of a run; override the ones of interest. Called on the main process only."""

    def on_loading(self, what: str, done: int, total: int, loss: float) -> None:
        """Something slow happens before the run: `done` of `total`, with its current loss."""

    def on_start(self, info: RunInfo) -> None:
        """The run is about to take its first step."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (from 1) is done; names and units of the metrics are in `klamp.diagnostics.metrics`."""

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """The skills were evaluated after `step` steps: skill -> mean score."""

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        """A sample of the step's completions."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint was written."""

    def on_alarm(self, finding: Finding) -> None:
        """An alarm rose; each is told once in a run. See `klamp.diagnostics.alarms`."""

    def on_warning(self, text: str) -> None:
        """Something the user should know, with the way out."""

    def on_end(self, summary: RunSummary) -> None:
        """The run is over."""

    def close(self) -> None:
        """Called once, also after an error."""
