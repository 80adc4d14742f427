"""The executor on a Ray cluster: each run is one Ray task, and is started again if its worker is killed."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from klamp.ablation.cluster_worker import SIGN, Post, job_of, keep_result, work
from klamp.ablation.executor import Tell, Update, noting_interrupts, stopped
from klamp.ablation.one_run import failed
from klamp.ablation.outcome import OUTCOME, Outcome, read_outcome, write_outcome
from klamp.ablation.plan import Run, plain_run, run_folder
from klamp.ablation.ray_files import pack_all
from klamp.config.addresses import check_cluster
from klamp.errors import ConfigError, TrainingStopped, missing_library

LOCAL = "local"
"""Address that stands for a cluster of this machine's own, which ends with the ablation."""

POLL = 0.5
"""Seconds between two looks at the cluster."""
REACH = 10.0
"""Longest wait for a host to answer, in seconds."""
SEVERAL = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The variable by which Ray has clusters of several machines, on any system: 0 keeps one on the loopback interface."""


class RayExecutor:
    """Runs every run of a plan as a Ray task; see `klamp.ablation.executor.Executor`.

    A run whose worker dies (killed, out of memory, its machine lost) is done again, elsewhere or from its checkpoint. A
    run that fails by its own error is not: it would fail again. Workers need the same klamp, and modules with reward
    functions of your own; models and data that are local files travel to them.

    Args:
        address: `auto`, `ray://HOST:10001`, `HOST:6379`, or `local` for a cluster of this machine only.
        cpus_per_run: CPUs that Ray sets aside for a run, and threads that torch uses.
        gpus_per_run: GPUs that Ray sets aside for a run; a fraction shares one.
        retries: how often a run is done again after its worker died.
    """

    def __init__(
        self, address: str = LOCAL, *, cpus_per_run: float = 1, gpus_per_run: float = 0, retries: int = 3
    ) -> None:
        if cpus_per_run <= 0 or gpus_per_run < 0 or retries < 0:
            raise ConfigError(
                "a run on Ray needs more than 0 CPUs, and no less than 0 GPUs and retries",
                got=f"cpus_per_run={cpus_per_run}, gpus_per_run={gpus_per_run}, retries={retries}",
                fix="1, 0 and 3 are the defaults",
            )
        check_cluster(address, "address")
        self.address, self.retries = address, retries
        self.cpus, self.gpus = cpus_per_run, gpus_per_run

    def describe(self) -> str:
        """Where the runs are run, in words."""
        where = "a Ray cluster on this machine" if self.address == LOCAL else f"the Ray cluster at {self.address}"
        gpus = f" and {self.gpus:g} GPU" if self.gpus else ""
        return f"{where}, {self.cpus:g} CPU{gpus} per run"

    def run(self, runs: Sequence[Run], folder: Path, tell: Tell) -> None:
        """Run all runs; see `klamp.ablation.executor.Executor`.

        Raises:
            MissingLibrary: Ray is not installed.
            ConfigError: no cluster answers, or one on this machine could never hold a run.
            TrainingStopped: Ctrl-C, once the runs under way have saved their state.
        """
        ray = load_ray(self.address)
        with connected(ray, self.address):
            self._check_resources(ray)
            tasks = _Tasks(ray, folder, tell)
            remote = ray.remote(
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                max_retries=self.retries,
                retry_exceptions=[TrainingStopped],  # its machine is being taken away, and the state was saved
                max_calls=1,  # a process per run, as on this machine: nothing is left over from the run before
            )(work)
            put = _leave if self.address == LOCAL else ray.put  # workers of this machine see the files themselves
            parcels = pack_all([plain_run(run)["config"] for run in runs], put)
            sign, threads = sign_of(folder), max(1, int(self.cpus))
            for run in runs:
                (run_folder(folder, run) / OUTCOME).unlink(missing_ok=True)
                job = job_of(run, folder=folder, sign=sign, parcels=parcels, threads=threads)
                tasks.pending[remote.remote(job, tasks.post)] = run
            tasks.finish()
        if tasks.interrupts:
            raise stopped(runs, folder) from KeyboardInterrupt()

    def _check_resources(self, ray: Any) -> None:
        """Refuse a run that asks for more than a cluster on this machine has: it would wait for ever."""
        there = ray.cluster_resources()
        lacking = there.get("CPU", 0) < self.cpus or there.get("GPU", 0) < self.gpus
        if self.address == LOCAL and lacking:
            raise ConfigError(
                "no run fits on this machine",
                got=f"{self.cpus:g} CPUs and {self.gpus:g} GPUs per run",
                why=f"the cluster has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs",
                fix="ask for less per run",
            )


def _leave(content: bytes) -> None:
    """Pack no files, for workers that read the same disk."""


class _Tasks:
    """The Ray tasks under way, and the reports of what happens to them."""

    def __init__(self, ray: Any, folder: Path, tell: Tell) -> None:
        self.ray, self.folder, self.tell = ray, folder, tell
        self.post = ray.remote(num_cpus=0, max_restarts=-1)(Post).remote()
        self.pending: dict[Any, Run] = {}
        self.interrupts = 0

    def finish(self) -> None:
        """Wait for all tasks and report what happens to each; for Ctrl-C see `_interrupt`."""
        try:
            noted: list[None] = []
            with noting_interrupts(lambda: noted.append(None)):
                while self.pending:
                    self._look()
                    if len(noted) > self.interrupts:
                        self._interrupt()
        finally:
            for reference in self.pending:
                self.ray.cancel(reference, force=True)
            self.ray.kill(self.post)

    def _look(self) -> None:
        """Pass on the reports that have come, and finish the tasks that have ended."""
        ended, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=POLL)
        self._relay()
        for reference in ended:
            run = self.pending.pop(reference)
            outcome = self._outcome(run, reference)
            if outcome is not None:
                text = outcome.error.partition("\n")[0]
                self.tell(Update(run=run.name, state=outcome.state, metrics=outcome.numbers, text=text))

    def _relay(self) -> None:
        """Pass on the workers' reports; how a run ended is reported later, once its files are here."""
        try:
            updates = self.ray.get(self.post.take.remote())
        except self.ray.exceptions.RayActorError:
            return  # its machine was lost; it starts again, and what it held is gone
        for update in updates:
            if update.state not in ("done", "failed"):
                self.tell(update)

    def _outcome(self, run: Run, reference: Any) -> Outcome | None:
        """The outcome of a task, with its files written; None where it was interrupted."""
        own = run_folder(self.folder, run)
        outcome, reason = None, "its worker sent no outcome"
        try:
            keep_result(self.ray.get(reference), own)
            outcome = read_outcome(own)
        except self.ray.exceptions.RayError as error:
            reason = reason_of(error)
        if outcome is None and not self.interrupts:
            own.mkdir(parents=True, exist_ok=True)
            outcome = failed(run, reason)
            write_outcome(own, outcome)
        return outcome

    def _interrupt(self) -> None:
        """End the tasks: first those under way after their step, the waiting ones at once; then kill what is left."""
        self.interrupts += 1
        for reference, run in self.pending.items():
            self.ray.cancel(reference, force=self.interrupts > 1)
            self.tell(Update(run=run.name, state="stopping"))


def reason_of(error: Exception) -> str:
    """Why a task failed: the run's own error where it had one, else what Ray says of its worker."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    first = str(error).strip().partition("\n")[0]
    return f"its worker died, and so did those that took it up again: {type(error).__name__}: {first}"


def sign_of(folder: Path) -> str:
    """A random text in an ablation's folder: a worker that reads it there sees the same disk as the driver."""
    file = folder / SIGN
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(16), encoding="utf-8")
    return file.read_text(encoding="utf-8")


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """A context with a connection to the cluster: the existing one, or a new one that is closed at the end.

    A new one listens on the loopback interface only: whoever reaches a Ray cluster can run code in it.

    Raises:
        ConfigError: no cluster answers at the address, or a new one would listen to other machines.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what klamp starts reports to nobody
    with _on_loopback() if address == LOCAL else nullcontext():
        _init(ray, address)
        try:
            if address == LOCAL:
                _check_loopback(ray)
            yield
        finally:
            ray.shutdown()


def _init(ray: Any, address: str) -> None:
    own = {"include_dashboard": False} if address == LOCAL else {}
    try:
        _reach(address)
        ray.init(address=address, namespace="klamp", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "no Ray cluster answers",
            got=f"address={address!r}",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            fix="auto finds the cluster of this machine, local starts one, ray://HOST:10001 reaches another; one that "
            "asks for a token gets it from RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
        ) from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """A context in which a cluster that Ray starts is reached from this machine only.

    Ray turns a `_node_ip_address` of 127.0.0.1 into the machine's own address and then listens on every interface. It
    keeps to the loopback where clusters of several machines are switched off, as they are on macOS by default: in the
    driver by a constant, which is read when Ray is imported, and in what it starts by a variable of the environment.
    """
    constants, before = sys.modules.get("ray._private.ray_constants"), os.environ.get(SEVERAL)
    several = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    os.environ[SEVERAL] = "0"
    if several is not None:
        setattr(constants, "ENABLE_RAY_CLUSTER", False)  # noqa: B010 - a module that is looked up has no such attribute
    try:
        yield
    finally:
        if several is not None:
            setattr(constants, "ENABLE_RAY_CLUSTER", several)  # noqa: B010
        os.environ.pop(SEVERAL)
        if before is not None:
            os.environ[SEVERAL] = before


def _check_loopback(ray: Any) -> None:
    address = ray.util.get_node_ip_address()
    if not ip_address(address).is_loopback:
        raise ConfigError(
            "a Ray cluster of this machine would listen to other machines",
            got=f"Ray {ray.__version__} at {address}",
            why="whoever reaches a Ray cluster can run code in it; this version of Ray does not keep to the loopback "
            f"interface with {SEVERAL}=0",
            fix="leave --ray out to use the processes of this machine, or name a cluster that you protect yourself",
        )


def _reach(address: str) -> None:
    """Refuse an address that nothing answers at; Ray itself would wait for minutes.

    Raises:
        OSError: nothing listens at this host and port.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()


def load_ray(address: str) -> Any:
    """The module `ray`, or the error that says how to install it.

    Args:
        address: as for `RayExecutor`. `local` asks for a token in the cluster, unless the environment says otherwise:
            Ray reads that when it is imported, and from 2.52 on; later versions do so by themselves.

    Raises:
        MissingLibrary: it is not installed.
    """
    if address == LOCAL and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        instead = "or leave --ray out to use the processes of this machine"
        raise missing_library("ray", by="--ray", instead=instead) from error
    return ray
