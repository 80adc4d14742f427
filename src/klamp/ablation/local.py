"""The executor on this machine: each run is a process, as many at a time as there are cores or GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from klamp.ablation.executor import LOG, Executor
from klamp.ablation.plan import Run, run_folder
from klamp.errors import ConfigError

COMMAND = (sys.executable, "-m", "klamp.ablation.one_run")
"""The run's folder and the id of this process are appended."""


class Job(NamedTuple):
    """The process of a run; the slot decides its GPU."""

    process: subprocess.Popen[bytes]
    log: Path
    slot: int


@dataclass(kw_only=True)
class LocalExecutor(Executor):
    """Runs each run of a plan in its own process."""

    at_once: int = 1
    threads: int = 1
    devices: tuple[str, ...] = ()
    """Values of CUDA_VISIBLE_DEVICES, shared among the processes; empty: the variable is not set."""

    def __post_init__(self) -> None:
        self.free = list(range(self.at_once))

    def describe(self) -> str:
        """Where the runs execute, in words."""
        many = f"{self.at_once} processes" if self.at_once > 1 else "1 process"
        where = f", GPUs {', '.join(self.devices)}" if self.devices else ""
        return f"{many} on this machine, {self.threads} thread{'s' if self.threads > 1 else ''} each{where}"

    def environment(self, slot: int) -> dict[str, str]:
        """The environment variables of the process in a slot: its number of threads, its GPU, its module path."""
        variables = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        if self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        return variables

    def start(self, run: Run, folder: Path) -> Job:
        """Start the process of a run."""
        own, slot = run_folder(folder, run), self.free.pop(0)
        with (own / LOG).open("wb") as log:
            process = subprocess.Popen(
                [*COMMAND, str(own), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(slot),
                start_new_session=True,  # Ctrl-C on the terminal reaches the parent only, which passes it on once
            )
        return Job(process, own / LOG, slot)

    def ended(self, job: Job) -> str | None:
        """How a process ended, with the last line of its log; None while it runs."""
        code = job.process.poll()
        if code is None:
            return None
        self.free.append(job.slot)
        how = f"the process ended with code {code} and left no outcome"
        if code == -signal.SIGKILL:
            how = "the process was killed (SIGKILL), as the system does if memory runs out: try fewer --workers"
        elif code < 0:
            how = f"the process was ended by {signal.Signals(-code).name}"
        lines = [line.strip() for line in job.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return f"{how}\n{f'last line of its log: {last[:300]}' if last else 'its log is empty'}\nlog: {job.log}"

    def stop(self, job: Job, *, kill: bool) -> None:
        """Interrupt a process, or kill it and wait for its end."""
        job.process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
        if kill:
            job.process.wait()


def local_executor(count: int, *, workers: int | None = None, cpu: bool = False) -> LocalExecutor:
    """The executor for this machine: one process per GPU, or without GPUs one per core; OMP_NUM_THREADS is kept if set.

    `count` includes the completed runs: the number of threads must not depend on what is left.
    """
    if os.name == "nt":
        raise ConfigError(
            "an ablation does not run on Windows",
            got=sys.platform,
            why="its processes are stopped by signals, as on Linux and macOS",
            fix="use WSL, or run the arms one by one with klamp train and compare them with klamp ablate --runs",
        )
    devices = () if cpu else visible_devices()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = workers or min(count, len(devices) or cores) or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() and int(given) else max(1, cores // fitting)
    return LocalExecutor(at_once=fitting, threads=threads, devices=devices)


def visible_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names[:count]) if len(names) >= count else tuple(map(str, range(count)))
