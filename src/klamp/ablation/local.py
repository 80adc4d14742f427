"""The executor on this machine: each run is a process, as many at a time as there are cores, or one on a GPU."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import NamedTuple

from klamp.ablation.execute import LOG, Executor
from klamp.ablation.plan import Run, run_folder
from klamp.errors import ConfigError

COMMAND = (sys.executable, "-m", "klamp.ablation.one_run")
"""The folder of the run is appended; the run itself comes on stdin, which stays open as long as this process lives."""


class Job(NamedTuple):
    """The process of a run."""

    process: Popen[bytes]
    log: Path


@dataclass(kw_only=True)
class LocalExecutor(Executor):
    """Runs each run of a plan in its own process."""

    at_once: int = 1
    threads: int = 1

    def describe(self) -> str:
        """Where the runs execute, in words."""
        return f"{self.at_once} at a time on this machine, threads each: {self.threads}"

    def start(self, run: Run, folder: Path) -> Job:
        """Start the process of a run."""
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
        return Job(process, own / LOG)

    def ended(self, job: Job) -> str | None:
        """How a process ended, with the last line of its log; None while it runs."""
        code = job.process.poll()
        if code is None:
            return None
        how = f"the process ended with code {code}" if code >= 0 else f"the process got {signal.Signals(-code).name}"
        memory = ", as the system does if memory runs out: try fewer --workers" if code == -signal.SIGKILL else ""
        lines = [line for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return f"{how}{memory}\nlast line of its log: {lines[-1][:300] if lines else 'none'}\nlog: {job.log}"

    def stop(self, job: Job, *, kill: bool) -> None:
        """Interrupt a process, or kill it and wait for its end."""
        job.process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
        if kill:
            job.process.wait()


def local_executor(count: int, *, workers: int | None = None, cpu: bool = False) -> LocalExecutor:
    """The executor for this machine: one process per core, or one on a GPU; OMP_NUM_THREADS is kept if set.

    `count` includes the completed runs: the number of threads must not depend on what is left.
    """
    import torch

    if os.name == "nt":
        raise ConfigError("an ablation does not run on Windows", why="it stops its processes by signals", fix="use WSL")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = workers or (1 if torch.cuda.is_available() and not cpu else min(count, cores))
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // at_once))
    return LocalExecutor(at_once=at_once, threads=threads)
