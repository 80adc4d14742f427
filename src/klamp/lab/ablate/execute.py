"""Executes the runs of a plan, in processes on this machine or on a Ray cluster; writes their table and picture."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any, Protocol, TypeAlias

from klamp.config.fields import check_cluster
from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped, missing_library
from klamp.files import yaml_of
from klamp.lab.ablate import results
from klamp.lab.ablate.plan import Plan, Run, plan_text, run_folder, runs
from klamp.lab.ablate.results import Outcome, Result, read_outcome, write_outcome
from klamp.lab.folders import LOCK, held, write_whole
from klamp.lab.tasks.arithmetic import Progress, without_bars

PLAN, LOG = "plan.yaml", "log.txt"
"""The file of the plan in an ablation's folder, and the one in a run's folder with the output of its process."""
COMMAND = (sys.executable, "-m", "klamp.lab.ablate.one_run")
"""The folder of the run is appended; the run itself comes on stdin, which stays open as long as this process lives."""
MOMENT = 0.1  # seconds between two looks at the runs
LOCAL = "local"  # the address of a Ray cluster on this machine only, which ends with the ablation
TRAVELS = {"working_dir": ".", "excludes": ["/runs", "/.git", "/.venv*"]}
"""Ray copies the current folder to a cluster, without these and without what .gitignore names."""
Tell: TypeAlias = Callable[[Run, Outcome | None], None]
"""Receives every run when it starts (None), and when it has ended or was done before."""


class Executor(Protocol):
    """Runs the runs of a plan; a subclass starts, watches and stops the job of one run."""

    at_once: int  # jobs at a time

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
                        (own / results.OUTCOME).unlink(missing_ok=True)
                        jobs.append((run, self.start(run, folder)))
                        tell(run, None)
                    time.sleep(MOMENT)
                    for run, job in list(jobs):
                        if (ending := self.ended(job)) is not None:
                            jobs.remove((run, job))
                            outcome = read_outcome(run_folder(folder, run))
                            if outcome is None and not stopping:
                                outcome = write_outcome(run_folder(folder, run), results.failed(run, ending))
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
        return f"{self.at_once} at a time on this machine, threads each: {self.threads}"

    def start(self, run: Run, folder: Path) -> tuple[Popen[bytes], Path]:
        own = run_folder(folder, run)
        variables = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with (own / LOG).open("wb") as log:
            # In a session of its own: Ctrl-C on the terminal reaches this process only, which passes it on once.
            command = [*COMMAND, str(own)]
            process = Popen(command, stdin=PIPE, stdout=log, stderr=STDOUT, env=variables, start_new_session=True)
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
        ending = f"the process ended with code {code}" if code >= 0 else f"the process got {signal.Signals(-code).name}"
        memory = ", as the system does if memory runs out: try fewer --workers" if code == -signal.SIGKILL else ""
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"{ending}{memory}\nlast line of its log: {lines[-1][:300] if lines else 'none'}\nlog: {log}"

    def stop(self, job: tuple[Popen[bytes], Path], *, kill: bool) -> None:
        process, _ = job
        process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
        if kill:
            process.wait()


def local_executor(count: int, *, workers: int | None = None, cpu: bool = False) -> LocalExecutor:
    """One process per core, or one on a GPU; `count` includes completed runs, for a constant number of threads."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = workers or (1 if torch.cuda.is_available() and not cpu else min(count, cores))
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // at_once))
    return LocalExecutor(at_once=at_once, threads=threads)


@dataclass(kw_only=True)
class RayExecutor(Executor):
    """Runs every run of a plan as a Ray task; Ray repeats one whose worker dies, three times, from its checkpoint."""

    address: str = LOCAL  # `auto`, `ray://HOST:10001`, `HOST:6379`, or `local`
    cpus_per_run: float = 1
    gpus_per_run: float = 0

    def __post_init__(self) -> None:
        check_cluster(self.address, "address")

    def describe(self) -> str:
        where = "a Ray cluster on this machine" if self.address == LOCAL else f"the Ray cluster at {self.address}"
        return f"{where}, CPUs per run: {self.cpus_per_run:g}, GPUs per run: {self.gpus_per_run:g}"

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs, within a connection to the cluster."""
        self.ray, self.at_once = load_ray(self.address), len(runs)
        with connected(self.ray, self.address):
            resources = {"GPU": 0, **self.ray.cluster_resources()}  # machines may join another cluster
            if self.address == LOCAL and (resources["CPU"] < self.cpus_per_run or resources["GPU"] < self.gpus_per_run):
                why = f"it has {resources['CPU']:g} CPUs and {resources['GPU']:g} GPUs: no run could ever start"
                what, fix = "no run fits on this machine", "ask for less per run"
                raise ConfigError(what, got=self.describe(), why=why, fix=fix)
            options = {"num_cpus": self.cpus_per_run, "num_gpus": self.gpus_per_run}  # Ray sets OMP_NUM_THREADS
            self.remote = self.ray.remote(**options, max_calls=1)(work)  # a process per run
            super().run(runs, folder, tell)

    def start(self, run: Run, folder: Path) -> Any:
        return self.remote.remote(run, folder.absolute())

    def ended(self, job: Any) -> str | None:
        if not self.ray.wait([job], timeout=0)[0]:
            return None
        try:
            self.ray.get(job)
        except self.ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).strip()}"
        return "the task ended and left no outcome"

    def stop(self, job: Any, *, kill: bool) -> None:
        self.ray.cancel(job, force=kill)


def work(run: Run, folder: Path) -> None:
    """Do one run on a worker, which has to see its folder."""
    from klamp.lab.ablate.one_run import perform

    own = run_folder(folder, run)
    if not own.is_dir():
        fix = "choose an --output_dir on a file system that all nodes share"
        why = "it writes its checkpoints and its outcome there"
        raise RunFolderError("a worker does not see the folder of the ablation", got=str(folder), why=why, fix=fix)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray sends it to a task that is cancelled
    logging.basicConfig(filename=own / LOG, level=logging.WARNING, force=True)  # the process does this run only
    perform(run, folder)


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """A context with a connection to the cluster: the existing one, or a new one that is closed at the end."""
    if ray.is_initialized():
        yield
        return
    options = {"include_dashboard": False} if address == LOCAL else {"runtime_env": TRAVELS}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RuntimeError, ValueError) as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        fix = "auto, local or ray://HOST:10001; if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        raise ConfigError("no Ray cluster can be used", got=f"address={address!r}", why=why, fix=fix) from error
    try:
        yield
    finally:
        ray.shutdown()


def load_ray(address: str) -> Any:
    """The module `ray`; before its import, a cluster on this machine is configured to refuse other machines."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage report
    if address == LOCAL and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # no cluster of several machines
    try:
        import ray
    except ImportError as error:
        raise missing_library("ray", by="--ray", instead="or leave --ray out, for processes on this machine") from error
    return ray


def check_folder(folder: Path, plan: Plan | None = None) -> None:
    """Refuse a folder with files of anything but this plan; writes nothing."""
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


@without_bars()
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
