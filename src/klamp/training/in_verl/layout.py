"""Where the files of a run lie that verl reads and writes: in the folder of the run, by absolute paths."""

from __future__ import annotations

from pathlib import Path

from klamp.training.folders import CHECKPOINTS, FOR_VERL


class Layout:
    """The files between klamp and verl.

    Args:
        folder: of the run; every machine of the cluster has to see it under this path.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder.absolute()
        self.output = self.root / "log.txt"
        """What verl's processes print."""
        inner = self.root / FOR_VERL
        self.train, self.held_out = inner / "train.parquet", inner / "held-out.parquet"
        self.task = inner / "task.json"
        """What the reward function opens the task with."""
        self.tokenizer = inner / "tokenizer"
        self.metrics = inner / "metrics.jsonl"
        """verl's file log."""
        self.rollouts, self.answers = inner / "rollouts", inner / "answers"
        """Completions of each step, and those of each evaluation."""
        self.hydra = inner / "hydra"
        self.checkpoints = self.root / CHECKPOINTS
        self.newest = self.checkpoints / "latest_checkpointed_iteration.txt"
        """The step of the newest whole checkpoint; verl writes it last."""

    def checkpoint(self, step: int) -> Path:
        """The folder of verl's checkpoint after a step."""
        return self.checkpoints / f"global_step_{step}"

    def newest_step(self) -> int:
        """The step of the newest whole checkpoint; 0: there is none."""
        try:
            return int(self.newest.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or just being written
            return 0
