"""The executor on a Ray cluster: each run is a Ray task. Every worker has to see the folder of the ablation."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klamp.config.fields import check_cluster
from klamp.errors import ConfigError, RunFolderError, missing_library
from klamp.lab.ablate.execute import LOG, Executor, Tell
from klamp.lab.ablate.one_run import perform
from klamp.lab.ablate.plan import Run, run_folder

LOCAL = "local"
"""The address of a cluster on this machine only, which ends with the ablation."""
TRAVELS = {"working_dir": ".", "excludes": ["/runs", "/.git", "/.venv*"]}
"""Ray copies the current folder to a cluster, without these and without what .gitignore names."""


def work(run: Run, folder: Path) -> None:
    """Do one run on a worker, which has to see its folder."""
    own = run_folder(folder, run)
    if not own.is_dir():
        fix = "choose an --output_dir on a file system that all nodes share"
        why = "it writes its checkpoints and its outcome there"
        raise RunFolderError("a worker does not see the folder of the ablation", got=str(folder), why=why, fix=fix)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ray sends it to a task that is cancelled
    logging.basicConfig(filename=own / LOG, level=logging.WARNING, force=True)  # the process does this run only
    perform(run, folder)


@dataclass(kw_only=True)
class RayExecutor(Executor):
    """Runs every run of a plan as a Ray task; Ray repeats one whose worker dies, three times, from its checkpoint."""

    address: str = LOCAL
    """`auto`, `ray://HOST:10001`, `HOST:6379`, or `local`."""
    cpus_per_run: float = 1
    gpus_per_run: float = 0

    def __post_init__(self) -> None:
        check_cluster(self.address, "address")

    def describe(self) -> str:
        """Where the runs execute, in words."""
        where = "a Ray cluster on this machine" if self.address == LOCAL else f"the Ray cluster at {self.address}"
        return f"{where}, CPUs per run: {self.cpus_per_run:g}, GPUs per run: {self.gpus_per_run:g}"

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs, within a connection to the cluster."""
        self.ray, self.at_once = load_ray(self.address), len(runs)
        with connected(self.ray, self.address):
            there = {"GPU": 0, **self.ray.cluster_resources()}  # machines may join another cluster
            if self.address == LOCAL and (there["CPU"] < self.cpus_per_run or there["GPU"] < self.gpus_per_run):
                raise ConfigError("no run fits on this machine", got=self.describe(), fix="ask for less per run")
            options = {"num_cpus": self.cpus_per_run, "num_gpus": self.gpus_per_run}  # Ray sets OMP_NUM_THREADS
            self.remote = self.ray.remote(**options, max_calls=1)(work)  # a process per run
            super().run(runs, folder, tell)

    def start(self, run: Run, folder: Path) -> Any:
        """Submit the task of a run; returns its reference."""
        return self.remote.remote(run, folder.absolute())

    def ended(self, job: Any) -> str | None:
        """How a task ended; None while it runs."""
        if not self.ray.wait([job], timeout=0)[0]:
            return None
        try:
            self.ray.get(job)
        except self.ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).strip()}"
        return "the task ended and left no outcome"

    def stop(self, job: Any, *, kill: bool) -> None:
        """Interrupt a task, or kill its worker."""
        self.ray.cancel(job, force=kill)


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """A context with a connection to the cluster: the existing one, or a new one that is closed at the end."""
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
            fix="auto, local or ray://HOST:10001; if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        ) from error
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
