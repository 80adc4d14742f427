"""The executor on this machine: each run is a process, as many at once as there are cores or GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from klamp.ablation.executor import LOG, Tell, Update, carry_out
from klamp.ablation.plan import Run
from klamp.ablation.worker import INTERRUPTED
from klamp.errors import ConfigError

MOMENT = 0.05
"""Seconds between two looks at the workers."""
COMMAND = (sys.executable, "-m", "klamp.ablation.worker")


@dataclass(frozen=True, kw_only=True)
class LocalExecutor:
    """Runs each run of a plan as a process of its own, `workers` at a time."""

    workers: int
    """How many processes work at once."""
    threads: int = 1
    """How many threads each process uses."""
    devices: tuple[str, ...] = ()
    """Values of CUDA_VISIBLE_DEVICES, shared out among the workers; none: the variable is left alone."""
    command: tuple[str, ...] = COMMAND
    """The command of a worker; the run's folder and a file descriptor are added to it."""

    def describe(self) -> str:
        """Where the runs are run, in words."""
        many = f"{self.workers} processes" if self.workers > 1 else "1 process"
        where = f", GPUs {', '.join(self.devices)}" if self.devices else ""
        return f"{many} on this machine, {self.threads} thread{'s' if self.threads > 1 else ''} each{where}"

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; see `klamp.ablation.executor.Executor`."""
        carry_out(runs, folder, tell, _Processes(self), at_once=self.workers)

    def environment(self, slot: int) -> dict[str, str]:
        """The environment variables of a worker: its number of threads, its GPU, its module path.

        Args:
            slot: number of the worker among those at work.
        """
        found = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        found["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        if self.devices:
            found["CUDA_VISIBLE_DEVICES"] = self.devices[slot % len(self.devices)]
        return found


def local_executor(count: int, *, workers: int | None = None, cpu: bool = False) -> LocalExecutor:
    """The executor that suits this machine: one process per core, or one per GPU.

    Without an accelerator: a worker per core, the cores shared out where there are fewer runs than cores. With some:
    one worker per accelerator. OMP_NUM_THREADS is kept where it is set.

    Args:
        count: runs of the plan, those that are done already included: threads must not depend on what is left.
        workers: processes at a time; None: as above.
        cpu: whether the runs stay on the CPU.

    Raises:
        ConfigError: on Windows.
    """
    if os.name == "nt":
        raise ConfigError(
            "an ablation does not run on Windows",
            got=sys.platform,
            why="its workers report through a pipe that they inherit, and end by signals, as on Linux and macOS",
            fix="use WSL, or run the arms one by one with klamp train and compare them with klamp ablate --runs",
        )
    devices = () if cpu else visible_devices()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = workers or min(count, len(devices) or cores) or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() and int(given) else max(1, cores // fitting)
    return LocalExecutor(workers=fitting, threads=threads, devices=devices)


def visible_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names[:count]) if len(names) >= count else tuple(map(str, range(count)))


class _Processes:
    """The worker processes; see `klamp.ablation.executor.Workers`."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor, self.children = executor, dict[str, _Child]()
        self.free = list(range(executor.workers))

    def start(self, run: Run, own: Path) -> None:
        """Start the process of a run."""
        slot = self.free.pop(0)
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        with (own / LOG).open("wb") as log:
            process = subprocess.Popen(
                [*self.executor.command, str(own), str(writes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.executor.environment(slot),
                pass_fds=(writes,),
                start_new_session=True,  # Ctrl-C on the terminal reaches the parent alone, which passes it on once
            )
        os.close(writes)
        self.children[run.name] = _Child(process=process, slot=slot, reads=reads, log=own / LOG)

    def look(self) -> tuple[Sequence[Update], Mapping[str, str]]:
        """Wait for a moment; what came through the pipes, and who has ended."""
        time.sleep(MOMENT)
        updates, ended = list[Update](), dict[str, str]()
        for name, child in list(self.children.items()):
            code = child.process.poll()  # before its pipe is read for the last time
            updates += child.told()
            if code is not None:
                ended[name] = f"{_how_ended(code)}\n{_last_line(child.log)}\nlog: {child.log}"
                os.close(child.reads)
                self.free.append(self.children.pop(name).slot)
        return updates, ended

    def stop(self, name: str, times: int) -> None:
        """Interrupt a process; the third time kill it."""
        self.children[name].process.send_signal(signal.SIGINT if times < 3 else signal.SIGKILL)

    def end(self) -> None:
        """End every process, and wait for it."""
        for child in self.children.values():
            child.process.terminate()
        for child in self.children.values():
            child.process.wait()


@dataclass(kw_only=True)
class _Child:
    """A worker process."""

    process: subprocess.Popen[bytes]
    slot: int
    """Its number among those at work."""
    reads: int
    """The file descriptor of what it tells; nobody waits for its end, which a grandchild may hold open."""
    log: Path
    begun: bytes = b""
    """The beginning of a line that has not come in full."""

    def told(self) -> Iterator[Update]:
        """What it has told since the last time."""
        with suppress(BlockingIOError):
            while found := os.read(self.reads, 2**16):
                self.begun += found
        *lines, self.begun = self.begun.split(b"\n")
        return (Update(**json.loads(line)) for line in lines)


def _how_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed (SIGKILL); the system does so when memory runs out: try fewer --workers"
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    if code == INTERRUPTED:
        return "the process was asked to stop, and saved its state; the same command continues it"
    return f"the process ended with code {code} and left no outcome"


def _last_line(log: Path) -> str:
    """The last line of a log file that is not empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    words = [line.strip() for line in lines if line.strip()]
    return f"last words: {words[-1][:300]}" if words else "its log is empty"
