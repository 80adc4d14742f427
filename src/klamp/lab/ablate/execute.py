"""Does the runs of a plan by an executor, such as the one of this machine, and writes their table and picture; the same
of runs that are there already."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any, Protocol, TypeAlias

from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.files import yaml_of
from klamp.lab.ablate.plan import Plan, Run, plan_text, run_folder, runs
from klamp.lab.ablate.results import (
    Outcome,
    Result,
    failed,
    is_done,
    read_outcome,
    write_outcome,
    write_results,
)
from klamp.lab.folders import LOCK, held, write_whole
from klamp.lab.tasks.base_model import Progress
from klamp.names import OUTCOME

PLAN, LOG = "plan.yaml", "log.txt"
"""The file of the plan in an ablation's folder, and the one in a run's folder with the output of its process."""
COMMAND = (sys.executable, "-m", "klamp.lab.ablate.one_run")
"""The folder of the run is appended; the run itself comes on stdin, which stays open as long as this process lives."""
MOMENT = 0.1
"""Seconds between two looks at the runs."""
Tell: TypeAlias = Callable[[Run, Outcome | None], None]
"""Receives every run when it starts (None), and when it has ended or was done before."""


class Executor(Protocol):
    """Runs the runs of a plan; a subclass starts, watches and stops the job of one run."""

    at_once: int
    """Jobs at a time."""

    def describe(self) -> str: ...  # where the runs execute, in words
    def start(self, run: Run, folder: Path) -> Any: ...  # returns the job of a run, whose folder exists
    def ended(self, job: Any) -> str | None: ...  # how a job ended, in words; None while it runs
    def stop(self, job: Any, *, kill: bool) -> None: ...  # asks a job to save its state and end, or kills it

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; each leaves an outcome.json. After Ctrl-C, TrainingStopped, when those under way have saved."""
        from klamp.lab.interrupts import deferred_interrupts

        waiting, jobs, stopping = deque(runs), list[tuple[Run, Any]](), False
        try:
            with deferred_interrupts() as interrupt:
                while jobs or waiting:
                    if interrupt.asked and not stopping:
                        stopping = True
                        waiting.clear()
                        for _, job in jobs:
                            self.stop(job, kill=False)
                    while waiting and len(jobs) < self.at_once:
                        run = waiting.popleft()
                        own = run_folder(folder, run)
                        own.mkdir(parents=True, exist_ok=True)
                        (own / OUTCOME).unlink(missing_ok=True)
                        jobs.append((run, self.start(run, folder)))
                        tell(run, None)
                    time.sleep(MOMENT)
                    for run, job in list(jobs):
                        if (how := self.ended(job)) is not None:
                            jobs.remove((run, job))
                            outcome = read_outcome(run_folder(folder, run))
                            if outcome is None and not stopping:
                                outcome = write_outcome(run_folder(folder, run), failed(run, how))
                            if outcome is not None:
                                tell(run, outcome)
        except KeyboardInterrupt:  # the second Ctrl-C
            stopping = True
        finally:
            for _, job in jobs:
                self.stop(job, kill=True)
        if stopping:
            why = "the runs under way saved their last completed step"
            fix = "repeat the command with the same --output_dir: it continues them"
            stopped = TrainingStopped("the ablation was stopped", got="an interrupt", why=why, fix=fix)
            raise stopped from KeyboardInterrupt()


@dataclass(kw_only=True)
class LocalExecutor(Executor):
    """Runs each run of a plan in its own process on this machine."""

    at_once: int = 1
    threads: int = 1

    def describe(self) -> str:
        """Where the runs execute, in words."""
        return f"{self.at_once} at a time on this machine, threads each: {self.threads}"

    def start(self, run: Run, folder: Path) -> tuple[Popen[bytes], Path]:
        """Start the process of a run; returns it and its log."""
        own = run_folder(folder, run)
        variables = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with (own / LOG).open("wb") as log:
            # In a session of its own: Ctrl-C on the terminal reaches this process only, which passes it on once.
            words = [*COMMAND, str(own)]
            process = Popen(words, stdin=PIPE, stdout=log, stderr=STDOUT, env=variables, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(run))
        process.stdin.flush()
        return process, own / LOG

    def ended(self, job: tuple[Popen[bytes], Path]) -> str | None:
        """How a process ended, with the last line of its log; None while it runs."""
        process, log = job
        code = process.poll()
        if code is None:
            return None
        how = f"the process ended with code {code}" if code >= 0 else f"the process got {signal.Signals(-code).name}"
        memory = ", as the system does if memory runs out: try fewer --workers" if code == -signal.SIGKILL else ""
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"{how}{memory}\nlast line of its log: {lines[-1][:300] if lines else 'none'}\nlog: {log}"

    def stop(self, job: tuple[Popen[bytes], Path], *, kill: bool) -> None:
        """Interrupt a process, or kill it and wait for its end."""
        process, _ = job
        process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
        if kill:
            process.wait()


def local_executor(count: int, *, workers: int | None = None, cpu: bool = False) -> LocalExecutor:
    """One process per core, or one on a GPU; `count` includes completed runs, so that the threads stay the same."""
    import torch

    if os.name == "nt":
        raise ConfigError("an ablation does not run on Windows", why="it stops its processes by signals", fix="use WSL")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = workers or (1 if torch.cuda.is_available() and not cpu else min(count, cores))
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // at_once))
    return LocalExecutor(at_once=at_once, threads=threads)


def check_folder(folder: Path, plan: Plan | None = None) -> None:
    """Refuse a folder that holds files, except those of this plan; nothing is written."""
    if plan is not None and (folder / PLAN).exists():
        what, why = "the output folder holds another ablation", "one table would mix the runs of two plans"
        try:
            free = yaml_of((folder / PLAN).read_text(encoding="utf-8")) == yaml_of(plan_text(plan))
        except ValueError:  # damaged
            free = False
    else:
        what, why = "the output folder is not empty", "an ablation never overwrites files"
        free = not folder.exists() or (folder.is_dir() and {each.name for each in folder.iterdir()} <= {LOCK})
    if not free:
        raise RunFolderError(what, got=str(folder), why=why, fix="choose another --output_dir, or leave it out")


def open_folder(plan: Plan, folder: Path) -> None:
    """Make the folder and write the plan into it."""
    check_folder(folder, plan)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PLAN, plan_text(plan))


def load_shared(every: Sequence[Run], progress: Progress | None = None) -> None:
    """Make klamp's own models that are not cached, and open every task and reward once; an error names the arm."""
    from klamp.lab.models import make_ready
    from klamp.lab.setup import open_inputs

    for run in {(run.config.model, run.config.task): run for run in every}.values():
        try:
            for name in filter(None, {run.config.model.model, run.config.model.ref_model}):
                make_ready(name, progress=progress)
            open_inputs(run.config)
        except KlampError as error:
            error.add_note(f"in the arm {run.arm.name!r}")
            raise


def execute(
    plan: Plan, folder: Path, executor: Executor, *, tell: Tell = lambda *_: None, progress: Progress | None = None
) -> Result:
    """Do every run that is not done yet, then write the table and the picture; a folder with this plan is continued.

    `tell` receives the runs that are done already, then those of the executor; `progress` follows a model that is made.
    """
    every = runs(plan)
    load_shared(every, progress)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, by="klamp ablate"):
        open_folder(plan, folder)
        waiting = [run for run in every if not is_done(folder, run)]
        for run in every:
            if run not in waiting:
                tell(run, read_outcome(run_folder(folder, run)))
        executor.run(waiting, folder, tell)
        outcomes = (read_outcome(run_folder(folder, run)) for run in every)
        return write_results([outcome for outcome in outcomes if outcome is not None], folder)


def compare(compared: Mapping[Path, Run], folder: Path, tell: Callable[[Run], None] = lambda run: None) -> Result:
    """Measure runs that are there already, which are only read; the table and the picture go into a free folder.

    `tell` receives each run before it is measured. A DataError refuses runs that are not finished.
    """
    from klamp.lab.ablate.one_run import finished, outcome_of

    check_folder(folder)
    summaries = {own: finished(own, run.config.run.max_steps) for own, run in compared.items()}
    for own in (own for own, summary in summaries.items() if summary is None):
        why = f"it has no checkpoint, or no summary of {compared[own].config.run.max_steps} steps"
        raise DataError("a run is not finished", got=str(own), why=why, fix=f"klamp train --resume {own}")
    outcomes = []
    for own, run in compared.items():
        tell(run)
        outcomes.append(outcome_of(run, own, summaries[own] or {}))
    folder.mkdir(parents=True, exist_ok=True)
    return write_results(outcomes, folder)
