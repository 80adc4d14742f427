"""The executor on this machine: each run is a process, as many at once as there are cores or GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from klamp.ablation.executor import Tell, Update, noting_interrupts, stopped
from klamp.ablation.outcome import OUTCOME, failed, read_outcome, write_outcome
from klamp.ablation.plan import Run, run_folder
from klamp.ablation.worker import INTERRUPTED, write_run
from klamp.errors import ConfigError

LOG = "log.txt"
READ_ON = 5.0
"""How long the reports of a worker are still read after its end, in seconds."""
COMMAND = (sys.executable, "-m", "klamp.ablation.worker")

Event: TypeAlias = tuple[str, Update | None]
"""(run, its report), (run, None) once its process has ended, or ("", None) for an interrupt."""

INTERRUPT: Event = ("", None)


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
        events: SimpleQueue[Event] = SimpleQueue()
        work = _Work(self, folder, tell, events, deque(runs))
        try:
            with noting_interrupts(lambda: events.put(INTERRUPT)):  # a SimpleQueue may be put to from a handler
                while work.go_on():
                    work.take(events.get())
        finally:
            work.end()
        if work.interrupts:
            raise stopped(runs, folder) from KeyboardInterrupt()

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
    cores, devices = usable_cores(), () if cpu else visible_devices()
    fitting = workers or min(count, len(devices) or cores) or 1
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() and int(given) else max(1, cores // fitting)
    return LocalExecutor(workers=fitting, threads=threads, devices=devices)


def usable_cores() -> int:
    """How many cores this process may use; all of the machine's where the system does not say (macOS, Windows)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_devices() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names[:count]) if len(names) >= count else tuple(map(str, range(count)))


class _Child:
    """A worker process and its run."""

    def __init__(self, run: Run, process: subprocess.Popen[bytes], slot: int) -> None:
        self.run, self.process, self.slot = run, process, slot


class _Work:
    """The runs that wait, and those that are under way."""

    def __init__(
        self, executor: LocalExecutor, folder: Path, tell: Tell, events: SimpleQueue[Event], waiting: deque[Run]
    ) -> None:
        self.executor, self.folder, self.tell, self.events, self.waiting = executor, folder, tell, events, waiting
        self.children: dict[str, _Child] = {}
        self.free = list(range(executor.workers))
        self.interrupts = 0

    def go_on(self) -> bool:
        """Start as many runs as there is room for; False once nothing is left to wait for."""
        while self.waiting and self.free:
            self._start(self.waiting.popleft(), self.free.pop(0))
        return bool(self.children)

    def take(self, event: Event) -> None:
        """Handle one report or one end of a worker."""
        name, update = event
        if event == INTERRUPT:
            self._interrupt()
        elif update is not None:
            self.tell(update)
        else:
            child = self.children.pop(name)
            self.free.append(child.slot)
            self._ended(child)

    def end(self) -> None:
        """End every worker, even after an error."""
        for child in self.children.values():
            child.process.terminate()
        for child in self.children.values():
            child.process.wait()

    def _start(self, run: Run, slot: int) -> None:
        own = run_folder(self.folder, run)
        write_run(own, run)
        (own / OUTCOME).unlink(missing_ok=True)
        reads, writes = os.pipe()
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
        self.children[run.name] = _Child(run, process, slot)
        threading.Thread(target=_listen, args=(run.name, process, reads, self.events), daemon=True).start()
        self.tell(Update(run=run.name, state="running", steps=run.config.run.max_steps))

    def _interrupt(self) -> None:
        """End the workers: the first time after their step, the second time at once; then kill what is left."""
        self.interrupts += 1
        self.waiting.clear()
        for name, child in self.children.items():
            child.process.send_signal(signal.SIGINT if self.interrupts < 3 else signal.SIGKILL)
            self.tell(Update(run=name, state="stopping"))

    def _ended(self, child: _Child) -> None:
        """The outcome of a worker that ended; one that left none was killed or interrupted."""
        own = run_folder(self.folder, child.run)
        if self.interrupts or read_outcome(own) is not None:
            return
        run = child.run
        error = f"{_how_ended(child.process.returncode)}\n{_last_line(own / LOG)}\nlog: {own / LOG}"
        write_outcome(own, failed(run, error))
        self.tell(Update(run=run.name, state="failed", text=error.partition("\n")[0]))


def _listen(name: str, process: subprocess.Popen[bytes], reads: int, events: SimpleQueue[Event]) -> None:
    """Pass on the reports of a worker, and at last that it has ended."""
    reader = threading.Thread(target=_pass_on, args=(name, reads, events), daemon=True)
    reader.start()
    process.wait()
    reader.join(timeout=READ_ON)  # a grandchild may hold the pipe open
    events.put((name, None))


def _pass_on(name: str, reads: int, events: SimpleQueue[Event]) -> None:
    with os.fdopen(reads, encoding="utf-8") as lines:
        for line in lines:
            try:
                events.put((name, Update(**json.loads(line))))
            except (ValueError, TypeError):  # the last line of a killed worker
                continue


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
