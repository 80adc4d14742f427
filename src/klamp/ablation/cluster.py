"""The executor on a Ray cluster: each run is a Ray task, and its small files come home as the task's result.

A worker that sees the ablation's folder works there, and a run that is started again goes on from its checkpoint. Any
other works in a folder of its machine, where its checkpoints stay.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from klamp._version import __version__
from klamp.ablation.executor import LOG, Tell, Update, carry_out
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import KEPT, OUTCOME
from klamp.ablation.plan import Run, run_folder, sees
from klamp.ablation.worker import alone
from klamp.config.rules import check_cluster
from klamp.errors import ConfigError, TrainingStopped, UnsupportedVersion, missing_library
from klamp.training.folders import RUNS

LOCAL = "local"
"""The address of a cluster of this machine's own, which ends with the ablation."""
RESULTS = (*KEPT, OUTCOME, LOG)
"""Names of the files that come home, and the only names that are written."""
TRAVELS = {"working_dir": ".", "excludes": ["/runs", "/.git", "/.venv*"]}
"""The current folder travels to a cluster, without these and without what .gitignore names."""


def work(run: Run, folder: Path, reports: Any, version: str) -> dict[str, bytes]:
    """Do one run on a worker; returns its small files, name -> content.

    Args:
        run: what to do.
        folder: of the ablation, on the machine that started it.
        reports: the `ray.util.queue.Queue` that the driver reads.
        version: of klamp there; another one's runs are not comparable.

    Raises:
        UnsupportedVersion: the worker has another version of klamp.
        KeyboardInterrupt, TrainingStopped: the task was cancelled; the run's state is saved.
    """
    if version != __version__:
        got = f"{__version__}, and {version} where the ablation was started"
        fix = f"install klamp=={version} on every node"
        raise UnsupportedVersion("the worker has another version of klamp", got=got, fix=fix)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what Ray raises in a task that is cancelled
    here = folder if sees(folder, run) else Path(tempfile.mkdtemp(prefix="klamp-"))
    own = run_folder(here, run)
    own.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=own / LOG, level=logging.WARNING, force=True)  # the process is this run's alone
    reports.put_nowait(Update(run=run.name, state="running"))
    with alone(own):
        perform(run, here, reports.put_nowait)
    return {name: (own / name).read_bytes() for name in RESULTS if (own / name).is_file()}


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
            raise ConfigError("a run needs more than 0 CPUs and no less than 0 GPUs", got=self.describe(), fix="1, 0")

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
        """
        ray = load_ray(self.address)
        with connected(ray, self.address):
            there = {"GPU": 0, **ray.cluster_resources()}  # elsewhere machines may join
            if self.address == LOCAL and (there["CPU"] < self.cpus_per_run or there["GPU"] < self.gpus_per_run):
                raise ConfigError("no run fits on this machine", got=self.describe(), fix="ask for less per run")
            remote = ray.remote(
                num_cpus=self.cpus_per_run,  # Ray sets OMP_NUM_THREADS to it
                num_gpus=self.gpus_per_run,
                retry_exceptions=[TrainingStopped],  # its machine is being taken away, and the state was saved
                max_calls=1,  # a process per run, as on this machine: nothing is left over from the run before
            )(work)
            carry_out(runs, folder, tell, _Tasks(ray, folder, remote), at_once=len(runs))


class _Tasks:
    """The Ray tasks under way; see `klamp.ablation.executor.Workers`."""

    def __init__(self, ray: Any, folder: Path, remote: Any) -> None:
        from ray.util.queue import Queue

        self.ray, self.folder, self.remote = ray, folder.absolute(), remote
        self.reports, self.pending = Queue(actor_options={"num_cpus": 0}), dict[str, Any]()

    def start(self, run: Run, own: Path) -> None:
        """Hand a run to the cluster."""
        self.pending[run.name] = self.remote.remote(run, self.folder, self.reports, __version__)

    def look(self) -> tuple[Sequence[Update], Mapping[str, str]]:
        """Wait for a moment; the reports that have come, and the tasks that have ended, their files written here."""
        ready, _ = self.ray.wait(list(self.pending.values()), num_returns=1, timeout=0.5)
        ended = [name for name, reference in self.pending.items() if reference in ready]
        updates = self.reports.get_nowait_batch(self.reports.qsize())
        return updates, {name: self._brought_home(name, self.pending.pop(name)) for name in ended}

    def _brought_home(self, name: str, reference: Any) -> str:
        """Write the files of a task where they are not there; how it ended."""
        own = self.folder / RUNS / name
        try:
            files = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).strip()}"
        for each in files.keys() & {*RESULTS} if not (own / OUTCOME).exists() else ():
            (own / each).write_bytes(files[each])
        return "its worker sent no outcome"

    def stop(self, name: str, times: int) -> None:
        """Interrupt a task; the second time kill its worker."""
        self.ray.cancel(self.pending[name], force=times > 1)

    def end(self) -> None:
        """Kill the workers that are left."""
        for name in self.pending:
            self.stop(name, 2)


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """A context with a connection to the cluster: the existing one, or a new one that is closed at the end.

    Raises:
        ConfigError: no cluster answers at the address, or a new one would listen to other machines.
    """
    if ray.is_initialized():
        yield
        return
    own = {"include_dashboard": False} if address == LOCAL else {"runtime_env": TRAVELS}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "no Ray cluster can be used",
            got=f"address={address!r}",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix="auto finds the cluster of this machine, local starts one, ray://HOST:10001 reaches another; where a "
            "token is asked for, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        ) from error
    try:
        here = ray.util.get_node_ip_address()
        if address == LOCAL and not ip_address(here).is_loopback:
            why = "whoever reaches it from another machine can run code in it; klamp has to import Ray first"
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
    except ImportError as error:
        raise missing_library("ray", by="--ray", instead="or leave --ray out, for this machine's processes") from error
    return ray
