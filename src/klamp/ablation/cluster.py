"""The executor on a Ray cluster: each run is a Ray task, and its small files come home as the task's result.

A worker that sees the ablation's folder works there, and a run that is started again goes on from its checkpoint. Any
other works in a folder of its machine, where its checkpoints stay.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from klamp._version import __version__
from klamp.ablation.executor import Tell, Update, noting_interrupts, stopped
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import OUTCOME, Outcome, failed, read_outcome, write_outcome
from klamp.ablation.plan import Run, plain_run, run_folder, run_of
from klamp.ablation.worker import RUN, alone, write_run
from klamp.config.rules import check_cluster
from klamp.diagnostics.doctor import ALARMS_FILE
from klamp.errors import ConfigError, TrainingStopped, UnsupportedVersion, missing_library
from klamp.training.folders import ANSWERS, COMPLETIONS, CONFIG, METRICS_FILE, RUNS, SUMMARY, VERSIONS

LOCAL = "local"
"""Address that stands for a cluster of this machine's own, which ends with the ablation."""
LOG = "log.txt"
RESULTS = (CONFIG, VERSIONS, METRICS_FILE, COMPLETIONS, ANSWERS, ALARMS_FILE, SUMMARY, OUTCOME, LOG)
"""Names of the files that come home, and the only names that are written."""
STAYS = ["/runs", "/.git", "/.venv*"]
"""What of the current folder does not travel to a cluster, beside what .gitignore names."""


def work(run: Mapping[str, Any], folder: str, reports: Any, version: str) -> dict[str, bytes]:
    """Do one run on a worker; returns its small files, name -> content.

    Args:
        run: see `klamp.ablation.plan.plain_run`.
        folder: of the ablation, on the machine that started it.
        reports: the `ray.util.queue.Queue` that the driver reads.
        version: of klamp there; another one's runs are not comparable.

    Raises:
        UnsupportedVersion: the worker has another version of klamp.
        KeyboardInterrupt, TrainingStopped: the task was cancelled; the run's state is saved.
    """
    if version != __version__:
        got, fix = (
            f"{__version__}, and {version} where the ablation was started",
            f"install klamp=={version} on every node",
        )
        raise UnsupportedVersion("the worker has another version of klamp", got=got, fix=fix)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what Ray raises in a task that is cancelled
    here, known = working_folder(run, folder), run_of(run)
    own = run_folder(here, known)
    write_run(own, known)
    logging.basicConfig(filename=own / LOG, level=logging.WARNING, force=True)  # the process is this run's alone
    reports.put_nowait(Update(run=known.name, state="running"))
    with alone(own):
        perform(known, here, reports.put_nowait)
    return {name: (own / name).read_bytes() for name in RESULTS if (own / name).is_file()}


def working_folder(run: Mapping[str, Any], folder: str) -> Path:
    """The ablation's own folder where the worker sees the run in it; else a new one of the worker's machine."""
    with suppress(OSError, ValueError):
        if json.loads((Path(folder) / RUNS / run["name"] / RUN).read_text(encoding="utf-8")) == run:
            return Path(folder)
    return Path(tempfile.mkdtemp(prefix="klamp-"))


@dataclass(frozen=True, kw_only=True)
class RayExecutor:
    """Runs every run of a plan as a Ray task; see `klamp.ablation.executor.Executor`.

    A run whose worker dies (killed, out of memory, its machine lost) is done again, by default three times. One that
    fails by its own error is not: it would fail again.
    """

    address: str = LOCAL
    """`auto`, `ray://HOST:10001`, `HOST:6379`, or `local` for a cluster of this machine only."""
    cpus_per_run: float = 1
    """CPUs that Ray sets aside for a run, and its threads."""
    gpus_per_run: float = 0
    """GPUs that Ray sets aside for a run; a fraction shares one."""

    def __post_init__(self) -> None:
        check_cluster(self.address, "address")
        if self.cpus_per_run <= 0 or self.gpus_per_run < 0:
            got = f"cpus_per_run={self.cpus_per_run}, gpus_per_run={self.gpus_per_run}"
            raise ConfigError("a run needs more than 0 CPUs, and no less than 0 GPUs", got=got, fix="1 and 0")

    def describe(self) -> str:
        """Where the runs are run, in words."""
        where = "a Ray cluster on this machine" if self.address == LOCAL else f"the Ray cluster at {self.address}"
        gpus = f" and {self.gpus_per_run:g} GPU" if self.gpus_per_run else ""
        return f"{where}, {self.cpus_per_run:g} CPU{gpus} per run"

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; see `klamp.ablation.executor.Executor`.

        Raises:
            MissingLibrary: Ray is not installed.
            ConfigError: no cluster can be used, or one of this machine could never hold a run.
            TrainingStopped: Ctrl-C, once the runs under way have saved their state.
        """
        ray = load_ray(self.address)
        with connected(ray, self.address):
            there = ray.cluster_resources()
            lacking = there["CPU"] < self.cpus_per_run or there.get("GPU", 0) < self.gpus_per_run
            if self.address == LOCAL and lacking:  # elsewhere machines may join
                raise ConfigError("no run fits on this machine", got=self.describe(), fix="ask for less per run")
            remote = ray.remote(
                num_cpus=self.cpus_per_run,  # Ray sets OMP_NUM_THREADS to it
                num_gpus=self.gpus_per_run,
                retry_exceptions=[TrainingStopped],  # its machine is being taken away, and the state was saved
                max_calls=1,  # a process per run, as on this machine: nothing is left over from the run before
            )(work)
            interrupts = _Tasks(ray, folder, tell).finish(runs, remote)
        if interrupts:
            raise stopped(runs, folder) from KeyboardInterrupt()


class _Tasks:
    """The Ray tasks under way."""

    def __init__(self, ray: Any, folder: Path, tell: Tell) -> None:
        from ray.util.queue import Queue

        self.ray, self.folder, self.tell = ray, folder, tell
        self.reports, self.pending = Queue(actor_options={"num_cpus": 0}), dict[Any, Run]()
        self.interrupts: list[None] = []

    def finish(self, runs: Sequence[Run], remote: Any) -> int:
        """Hand all runs to the cluster and wait; the first Ctrl-C ends them after their step, the second kills them."""
        seen = 0
        try:
            for run in runs:
                write_run(run_folder(self.folder, run), run)
                (run_folder(self.folder, run) / OUTCOME).unlink(missing_ok=True)
                given = plain_run(run), str(self.folder.absolute())
                self.pending[remote.remote(*given, self.reports, __version__)] = run
            with noting_interrupts(lambda: self.interrupts.append(None)):
                while self.pending:
                    self._look()
                    for reference, run in self.pending.items() if len(self.interrupts) > seen else ():
                        self.ray.cancel(reference, force=len(self.interrupts) > 1)
                        self.tell(Update(run=run.name, state="stopping"))
                    seen = len(self.interrupts)
        finally:
            for reference in self.pending:
                self.ray.cancel(reference, force=True)
        return seen

    def _look(self) -> None:
        """Pass on the reports that have come, and finish the tasks that have ended."""
        ended, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=0.5)
        for update in self.reports.get_nowait_batch(self.reports.qsize()):
            if update.state not in ("done", "failed"):  # told once the run's files are here
                self.tell(update)
        for reference in ended:
            run = self.pending.pop(reference)
            outcome = self._outcome(run, reference)
            if outcome is not None:
                text = outcome.error.partition("\n")[0]
                self.tell(Update(run=run.name, state=outcome.state, metrics=outcome.numbers, text=text))

    def _outcome(self, run: Run, reference: Any) -> Outcome | None:
        """The outcome of a task, its files written where they are not there; None where it was interrupted."""
        own, reason = run_folder(self.folder, run), "its worker sent no outcome"
        try:
            files = self.ray.get(reference)
            for name in RESULTS if not (own / OUTCOME).exists() else ():
                if name in files:
                    (own / name).write_bytes(files[name])
        except self.ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).strip()}"
        outcome = read_outcome(own)
        if outcome is None and not self.interrupts:
            outcome = failed(run, reason)
            write_outcome(own, outcome)
        return outcome


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """A context with a connection to the cluster: the existing one, or a new one that is closed at the end.

    Raises:
        ConfigError: no cluster answers at the address, or a new one would listen to other machines.
    """
    if ray.is_initialized():
        yield
        return
    travels = {"runtime_env": {"working_dir": ".", "excludes": STAYS}}
    own = {"include_dashboard": False} if address == LOCAL else travels
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "no Ray cluster can be used",
            got=f"address={address!r}",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix="auto finds the cluster of this machine, local starts one, ray://HOST:10001 reaches another; one that "
            "asks for a token gets it from RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        ) from error
    try:
        here = ray.util.get_node_ip_address()
        if address == LOCAL and not ip_address(here).is_loopback:
            why = (
                "it listens to other machines, and whoever reaches it can run code in it; klamp has to import Ray first"
            )
            raise ConfigError("the Ray cluster of this machine is not closed", got=here, why=why, fix="leave --ray out")
        yield
    finally:
        ray.shutdown()


def load_ray(address: str) -> Any:
    """The module `ray`; a cluster of this machine's own is told, before Ray is imported, to be closed to others.

    Raises:
        MissingLibrary: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what klamp starts reports to nobody
    if address == LOCAL and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # no cluster of several machines
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        instead = "or leave --ray out to use the processes of this machine"
        raise missing_library("ray", by="--ray", instead=instead) from error
    return ray
