"""Executes the runs of a plan, in processes on this machine; writes their table and picture."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any, NamedTuple, TypeAlias

from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.files import yaml_of
from klamp.lab.ablate import results
from klamp.lab.ablate.plan import Plan, Run, plan_text, run_folder, runs
from klamp.lab.ablate.results import Outcome, Result, read_outcome, write_outcome
from klamp.lab.folders import LOCK, held, write_whole
from klamp.lab.tasks.arithmetic import Progress

PLAN, LOG = "plan.yaml", "log.txt"
"""The file of the plan in an ablation's folder, and the one in a run's folder with the output of its process."""
COMMAND = (sys.executable, "-m", "klamp.lab.ablate.one_run")
"""The folder of the run is appended; the run itself comes on stdin, which stays open as long as this process lives."""
MOMENT = 0.1  # seconds between two looks at the runs
Tell: TypeAlias = Callable[[Run, Outcome | None], None]
"""Receives every run when it starts (None), and when it has ended or was done before."""


class Job(NamedTuple):
    """A run under way."""

    run: Run
    folder: Path  # the run's own
    process: Popen[bytes]
    gpu: str | None

    def stop(self, *, kill: bool) -> None:
        """Ask the process to save its state and end, or kill it."""
        self.process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
        if kill:
            self.process.wait()

    def ending(self) -> str:
        """How the process ended, with the last line of its log."""
        code, log = self.process.returncode, self.folder / LOG
        ending = f"the process ended with code {code}" if code >= 0 else f"the process got {signal.Signals(-code).name}"
        memory = ", as the system does if memory runs out: try fewer --workers" if code == -signal.SIGKILL else ""
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"{ending}{memory}\nlast line of its log: {lines[-1][:300] if lines else 'none'}\nlog: {log}"


@dataclass(kw_only=True)
class Executor:
    """Runs each run of a plan in its own process on this machine."""

    at_once: int = 1
    threads: int = 1
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; a run gets the one with the fewest runs

    def describe(self) -> str:
        """Where the runs execute, in words."""
        gpus = f", one GPU each of {len(self.gpus)}" if self.gpus else ""
        return f"{self.at_once} at a time on this machine, threads each: {self.threads}{gpus}"

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; each leaves an outcome.json. After Ctrl-C, TrainingStopped, when those under way have saved."""
        from klamp.lab.interrupts import deferred_interrupts

        waiting, jobs, stopping = deque(runs), list[Job](), False
        try:
            with deferred_interrupts() as interrupt:
                while jobs or waiting:
                    if interrupt.asked and not stopping:
                        stopping = True
                        waiting.clear()
                        for job in jobs:
                            job.stop(kill=False)
                    while waiting and len(jobs) < self.at_once:
                        jobs.append(self._start(waiting.popleft(), folder, [job.gpu for job in jobs]))
                        tell(jobs[-1].run, None)
                    time.sleep(MOMENT)
                    for job in [job for job in jobs if job.process.poll() is not None]:
                        jobs.remove(job)
                        outcome = read_outcome(job.folder)
                        if outcome is None and not stopping:
                            outcome = write_outcome(job.folder, results.failed(job.run, job.ending()))
                        if outcome is not None:
                            tell(job.run, outcome)
        except KeyboardInterrupt:  # the second Ctrl-C
            stopping = True
        finally:
            for job in jobs:
                job.stop(kill=True)
        if stopping:
            why = "the runs under way saved their last completed step"
            fix = "repeat the command with the same --output_dir: it continues them"
            stopped = TrainingStopped("the ablation was stopped", got="an interrupt", why=why, fix=fix)
            raise stopped from KeyboardInterrupt()

    def _start(self, run: Run, folder: Path, used: Sequence[str | None]) -> Job:
        """Start the process of a run; `used`: the GPUs of the runs under way."""
        own, gpu = run_folder(folder, run), min(self.gpus, key=used.count, default=None)
        own.mkdir(parents=True, exist_ok=True)
        (own / results.OUTCOME).unlink(missing_ok=True)
        variables = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        variables |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        with (own / LOG).open("wb") as log:
            # In a session of its own: Ctrl-C on the terminal reaches this process only, which passes it on once.
            command = [*COMMAND, str(own)]
            process = Popen(command, stdin=PIPE, stdout=log, stderr=STDOUT, env=variables, start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(run))
        process.stdin.flush()
        return Job(run, own, process, gpu)


def executor_for(count: int, *, workers: int | None = None, cpu: bool = False) -> Executor:
    """One process per GPU, else per core; `count` includes completed runs, so that the threads stay the same."""
    import torch

    if os.name == "nt":
        raise ConfigError("an ablation does not run on Windows", why="it stops its processes by signals", fix="use WSL")
    visible, gpu_count = os.environ.get("CUDA_VISIBLE_DEVICES"), 0 if cpu else torch.cuda.device_count()
    gpus = tuple(visible.split(",") if visible else map(str, range(gpu_count)))[:gpu_count]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = workers or min(count, len(gpus) or cores)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // at_once))
    return Executor(at_once=at_once, threads=threads, gpus=gpus)


def check_folder(folder: Path, plan: Plan | None = None) -> None:
    """Refuse a folder that holds files, except those of this plan; nothing is written."""
    what, why = "the output folder is not empty", "an ablation never overwrites files"
    free = not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK})
    if plan is not None and (folder / PLAN).exists():
        what, why = "the output folder holds another ablation", "one table would mix the runs of two plans"
        with suppress(ValueError):  # damaged
            free = yaml_of((folder / PLAN).read_text(encoding="utf-8")) == yaml_of(plan_text(plan))
    if not free:
        raise RunFolderError(what, got=str(folder), why=why, fix="choose another --output_dir, or leave it out")


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
    """Do every run that is not done yet, then write the table and the picture; a folder with this plan is continued."""
    every = runs(plan)
    load_shared(every, progress)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, by="klamp ablate"):
        check_folder(folder, plan)
        write_whole(folder / PLAN, plan_text(plan))
        waiting = [run for run in every if not results.is_done(folder, run)]
        for run in every:
            if run not in waiting:
                tell(run, read_outcome(run_folder(folder, run)))
        executor.run(waiting, folder, tell)
        outcomes = (read_outcome(run_folder(folder, run)) for run in every)
        return results.write_results([outcome for outcome in outcomes if outcome is not None], folder)


def compare(compared: Mapping[Path, Run], folder: Path, tell: Callable[[Run], None] = lambda run: None) -> Result:
    """Measure finished runs, which are only read; the table and the picture go into a free folder."""
    from klamp.lab.ablate.one_run import finished, outcome_of

    check_folder(folder)
    outcomes, summaries = list[Outcome](), dict[Path, Mapping[str, Any]]()
    for own, run in compared.items():
        if (summary := finished(own, run.config.run.max_steps)) is None:
            why = f"it has no checkpoint, or no summary of {run.config.run.max_steps} steps"
            raise DataError("a run is not finished", got=str(own), why=why, fix=f"klamp train --resume {own}")
        summaries[own] = summary
    for own, run in compared.items():
        tell(run)
        outcomes.append(outcome_of(run, own, summaries[own]))
    folder.mkdir(parents=True, exist_ok=True)
    return results.write_results(outcomes, folder)
