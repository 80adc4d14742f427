"""Waits of a run's processes for each other, which torch ends when they are in vain: what klamp says then.

A wait is over when the connection to another process breaks, or when `process_timeout` is: the group of the processes
is made with it. Whom it was for, torch does not say; the launcher says which process died.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistError

from klamp.errors import KlampError, TrainerFailed
from klamp.training.config import TrainConfig


def timeout_of(config: TrainConfig) -> timedelta:
    """The longest wait for another process, as torch takes it."""
    return timedelta(seconds=config.run.process_timeout)


def is_wait_in_vain(error: Exception) -> bool:
    """Whether an error is that of a wait for another process; gloo has no class of its own, but names its files."""
    return isinstance(error, DistError) or "gloo" in str(error)


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """A context in which a wait in vain is an error of klamp.

    Args:
        config: of the run.

    Raises:
        TrainerFailed: another process is gone, has left the run, or did not come within `process_timeout`.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, KlampError) or not is_wait_in_vain(error):
            raise
        raise TrainerFailed(
            "the processes of the run lost each other",
            got=str(error).partition("\n")[0],
            why=f"one of them died, left the run, or took longer than process_timeout={config.run.process_timeout:g} s",
            fix="see which one the launcher or that process itself names, and whether its machine ran out of memory; "
            "raise process_timeout if one may take longer; then --resume",
        ) from error
