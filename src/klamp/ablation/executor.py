"""Starts the runs of a plan, reports their progress, and records their outcomes: one loop for every executor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from klamp.ablation.outcome import OUTCOME, failed, is_done, read_outcome, write_outcome
from klamp.ablation.plan import Run, run_folder
from klamp.errors import TrainingStopped
from klamp.training.folders import METRICS_FILE, lines_of

LOG = "log.txt"
"""The file in a run's folder with the output of its process."""
MOMENT = 0.1
"""Seconds between two looks at the runs."""

RunState: TypeAlias = Literal["waiting", "running", "stopping", "done", "failed", "kept"]
"""The states of a run; `kept`: an earlier command completed it."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A report about one run: completed steps, steps in all (0: not known yet), metrics, and why it failed."""

    run: str
    state: RunState
    step: int = 0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


Tell: TypeAlias = Callable[[Update], None]


class Executor(Protocol):
    """Runs the runs of a plan; a subclass starts, watches and stops the job of one run."""

    at_once: int
    """Jobs at a time."""

    def describe(self) -> str: ...  # where the runs execute, in words
    def start(self, run: Run, folder: Path) -> Any: ...  # returns the job of a run, whose folder exists
    def ended(self, job: Any) -> str | None: ...  # how a job ended, in words; None while it runs
    def stop(self, job: Any, *, kill: bool) -> None: ...  # asks a job to save its state and end, or kills it

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; each leaves an outcome.json in its folder.

        A run that fails, or whose process dies, is recorded as failed; the others continue. Ctrl-C raises
        TrainingStopped, from KeyboardInterrupt, after the runs under way have saved their state.
        """
        from klamp.training.interrupts import deferred_interrupts

        waiting, jobs, sizes, stopping = deque(runs), dict[str, tuple[Run, Any]](), dict[str, int](), False
        try:
            with deferred_interrupts() as interrupt:
                while jobs or (waiting and not interrupt.asked):
                    while waiting and len(jobs) < self.at_once and not interrupt.asked:
                        run = waiting.popleft()
                        own = run_folder(folder, run)
                        own.mkdir(parents=True, exist_ok=True)
                        (own / OUTCOME).unlink(missing_ok=True)
                        sizes[run.name] = _size(own / METRICS_FILE)
                        jobs[run.name] = run, self.start(run, folder)
                        tell(Update(run=run.name, state="running"))
                    if interrupt.asked and not stopping:
                        stopping = True
                        for name, (_, job) in jobs.items():
                            self.stop(job, kill=False)
                            tell(Update(run=name, state="stopping"))
                    time.sleep(MOMENT)
                    for name, (run, job) in list(jobs.items()):
                        how = self.ended(job)
                        file = run_folder(folder, run) / METRICS_FILE
                        if (size := _size(file)) != sizes[name] and not stopping:
                            sizes[name] = size
                            _tell_step(run, lines_of(file), tell)
                        if how is not None:
                            del jobs[name]
                            _conclude(run, folder, tell, "" if stopping else how)
        except KeyboardInterrupt:  # the second Ctrl-C
            stopping = True
        finally:
            for _, job in jobs.values():
                self.stop(job, kill=True)
        if stopping:
            left = sum(not is_done(folder, run) for run in runs)
            raise TrainingStopped(
                f"the ablation was stopped with {left} of {len(runs)} runs not done",
                got="an interrupt",
                why="the runs under way saved their last completed step",
                fix="repeat the command: it continues them",
            ) from KeyboardInterrupt()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _tell_step(run: Run, rows: Sequence[Mapping[str, Any]], tell: Tell) -> None:
    """Report the last step that a run has logged; the rows of evaluations have no reward."""
    if row := next((row for row in reversed(rows) if "reward" in row), None):
        steps = run.config.run.max_steps
        tell(Update(run=run.name, state="running", step=row["step"], steps=steps, metrics=row))


def _conclude(run: Run, folder: Path, tell: Tell, how: str) -> None:
    """Report the outcome of a run that ended; without an outcome it failed, unless it was interrupted (`how` is "")."""
    own, steps = run_folder(folder, run), run.config.run.max_steps
    outcome = read_outcome(own)
    if outcome is None and how:
        outcome = failed(run, how)
        write_outcome(own, outcome)
    if outcome is not None:
        step, text = steps if outcome.state == "done" else 0, outcome.error.partition("\n")[0]
        tell(Update(run=run.name, state=outcome.state, step=step, steps=steps, metrics=outcome.numbers, text=text))
