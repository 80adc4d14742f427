"""The function that trains with each backend; the libraries of the others are not loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from klamp.training.config import TrainConfig
from klamp.training.folders import checkpoint_folders
from klamp.training.observers import Observer, RunSummary
from klamp.training.sections import Backend

Runner: TypeAlias = Callable[[TrainConfig, Sequence[Observer]], RunSummary]


def trainer_of(backend: Backend) -> Runner:
    """What carries a run out: it takes the configuration and those who look on, and returns the summary."""
    if backend == "tinker":
        from klamp.training.service.train import train_run
    elif backend == "trl":
        from klamp.training.in_trl.train import train_run
    elif backend == "verl":
        from klamp.training.in_verl.train import train_run
    else:
        from klamp.training.trainer import train_run
    return train_run


def newest_policy(folder: Path) -> Path | None:
    """The model (or adapter) in a run's newest checkpoint, of klamp's own loop or TRL's; None where it has none.

    Args:
        folder: of the run.
    """
    saved = checkpoint_folders(folder)
    if not saved:
        return None
    return saved[-1] / "policy" if saved[-1].name.startswith("step-") else saved[-1]
