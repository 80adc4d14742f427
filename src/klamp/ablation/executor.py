"""What an executor is: it runs the runs of a plan, somewhere, and reports how they go."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, TypeAlias

from klamp.ablation.outcome import is_done
from klamp.ablation.plan import Run
from klamp.errors import TrainingStopped

RunState: TypeAlias = Literal["waiting", "running", "measuring", "stopping", "done", "failed", "kept"]
"""The states of a run; `kept` means that it was done before and is left as it is."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A report about one run: started, at which step, done, failed."""

    run: str
    """The name of the run."""
    state: RunState
    """The state of the run."""
    step: int = 0
    """How many steps are done."""
    steps: int = 0
    """How many steps there are in all; 0: not known yet."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the step; once the run is done, the numbers of its outcome."""
    text: str = ""
    """One line: an alarm that rose, or why the run failed."""


Tell: TypeAlias = Callable[[Update], None]


class Executor(Protocol):
    """Anything that can run the runs of a plan."""

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; each leaves an outcome.json in its folder (`klamp.ablation.plan.run_folder`).

        A run that fails, or whose process is killed, is told and written down as failed; the others go on.

        Args:
            runs: what to run; a folder with a checkpoint is continued, one without starts anew.
            folder: of the ablation.
            tell: called from the calling thread with what becomes of each run.

        Raises:
            TrainingStopped: Ctrl-C, from KeyboardInterrupt, once the runs under way have saved their state.
        """
        ...

    def describe(self) -> str:
        """Where the runs are run, in words: "2 processes on this machine, 1 thread each"."""
        ...


@contextmanager
def noting_interrupts(note: Callable[[], None]) -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM are only noted, so that no work is cut in the middle; main thread only.

    Args:
        note: called from the signal handler, so that it must neither wait nor lock.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        note()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stopped(runs: Sequence[Run], folder: Path) -> TrainingStopped:
    """The error of an ablation that was interrupted, which says how to go on.

    Args:
        runs: of the ablation.
        folder: of the ablation.
    """
    done = sum(is_done(folder, run) for run in runs)
    return TrainingStopped(
        f"the ablation was stopped with {len(runs) - done} of {len(runs)} runs not done",
        got="an interrupt",
        why="the runs under way were saved after their last step, where they ran",
        fix="the same command again goes on where they stopped",
    )
