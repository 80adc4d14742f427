"""klamp's own trainer: rollouts, references, updates, checkpoints; transformers, accelerate and peft are used here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from klamp.training.config import TrainConfig
    from klamp.training.observers import Observer, RunSummary
    from klamp.training.sections import Backend

Runner: TypeAlias = "Callable[[TrainConfig, Sequence[Observer]], RunSummary]"


def trainer_of(backend: Backend) -> Runner:
    """What carries a run out with a backend: it takes the configuration and those who look on, and returns the summary.

    The libraries of the other backends are not loaded.
    """
    if backend == "tinker":
        from klamp.training.service.train import train_run
    elif backend == "trl":
        from klamp.training.in_trl.train import train_run
    elif backend == "verl":
        from klamp.training.in_verl.train import train_run
    else:
        from klamp.training.trainer import train_run
    return train_run
