"""What an executor is: it runs the runs of a plan, somewhere, and reports how they go; and what all of them share."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, TypeAlias

from klamp.ablation.outcome import OUTCOME, failed, is_done, read_outcome, write_outcome
from klamp.ablation.plan import Run, run_folder
from klamp.errors import TrainingStopped

LOG = "log.txt"
"""The file in a run's folder that holds what its process prints."""

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
            folder: of the ablation; it holds the plan, which has these runs.
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


class Workers(Protocol):
    """The processes of the runs under way, wherever they are."""

    def start(self, run: Run, own: Path) -> None:
        """Start a run, whose folder is there."""
        ...

    def look(self) -> tuple[Sequence[Update], Mapping[str, str]]:
        """Wait for a moment; what the runs have told, and those whose process has ended: name -> how, in words."""
        ...

    def stop(self, name: str, times: int) -> None:
        """Ask a run to end: the first time after its step, the second time at once; then kill it."""
        ...

    def end(self) -> None:
        """End all that is under way, after an error."""
        ...


def carry_out(runs: Sequence[Run], folder: Path, tell: Tell, workers: Workers, *, at_once: int) -> None:
    """Start the runs, pass on what they tell, and write an outcome for each whose process ended without one.

    Args:
        runs: what to run.
        folder: of the ablation.
        tell: see `Executor`.
        workers: who runs them.
        at_once: how many at a time, at most.

    Raises:
        TrainingStopped: see `Executor`.
    """
    waiting, under_way = deque(runs), dict[str, Run]()
    interrupts, heard = list[None](), 0
    try:
        with noting_interrupts(lambda: interrupts.append(None)):
            while under_way or (waiting and not interrupts):
                while waiting and len(under_way) < at_once and not interrupts:
                    run = waiting.popleft()
                    own = run_folder(folder, run)
                    own.mkdir(parents=True, exist_ok=True)
                    (own / OUTCOME).unlink(missing_ok=True)
                    workers.start(run, own)
                    under_way[run.name] = run
                updates, ended = workers.look()
                for update in updates:
                    if update.state not in ("done", "failed"):  # told once its process has ended
                        tell(update)
                for name, how in ended.items():
                    _ended(under_way.pop(name), folder, tell, "" if interrupts else how)
                asked = len(interrupts)
                for name in under_way if asked > heard else ():
                    workers.stop(name, asked)
                    tell(Update(run=name, state="stopping"))
                heard = asked
    finally:
        workers.end()
    if interrupts:
        left = sum(not is_done(folder, run) for run in runs)
        raise TrainingStopped(
            f"the ablation was stopped with {left} of {len(runs)} runs not done",
            got="an interrupt",
            why="the runs under way were saved after their last step, where they ran",
            fix="the same command again goes on where they stopped",
        ) from KeyboardInterrupt()


def _ended(run: Run, folder: Path, tell: Tell, how: str) -> None:
    """Tell the outcome of a run whose process has ended; one that left none has failed, or was interrupted ("")."""
    own, steps = run_folder(folder, run), run.config.run.max_steps
    outcome = read_outcome(own)
    if outcome is None and how:
        outcome = failed(run, how)
        write_outcome(own, outcome)
    if outcome is not None:
        step, text = steps if outcome.state == "done" else 0, outcome.error.partition("\n")[0]
        tell(Update(run=run.name, state=outcome.state, step=step, steps=steps, metrics=outcome.numbers, text=text))
