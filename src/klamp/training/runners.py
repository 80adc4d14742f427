"""The function that trains with each backend; the libraries of the others are not loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from klamp.hosts.common.policy_folder import POLICY
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
    """The model (or adapter) in a run's newest checkpoint, whoever trained; None where it has none.

    verl's checkpoints hold a model only where all weights are trained: an adapter of theirs is in shards.

    Args:
        folder: of the run.
    """
    saved = checkpoint_folders(folder)
    return policy_in(saved[-1]) if saved else None


def policy_in(checkpoint: Path) -> Path:
    """Where a checkpoint has its model (or adapter), whoever trained.

    Args:
        checkpoint: one of a run's, see `checkpoint_folders`.
    """
    inside = {"step": POLICY, "global": "actor/huggingface"}
    return checkpoint / inside.get(re.split("[-_]", checkpoint.name)[0], "")
