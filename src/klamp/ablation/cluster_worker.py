"""The part of an ablation that runs on a Ray worker: one run, its reports, and its small files on the way back.

Nothing on the worker's disk is taken to be shared. Where the worker sees the ablation's own folder it works there, and
a run that is started again continues from its checkpoint. Elsewhere it works in a folder of its machine, which the same
ablation finds again there; its small files travel back, checkpoints stay.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp._version import __version__
from klamp.ablation.executor import Update
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import OUTCOME
from klamp.ablation.plan import Run, plain_run, run_folder, run_of
from klamp.ablation.ray_files import Parcels, unpack_all
from klamp.ablation.worker import alone, write_run
from klamp.diagnostics.watch import ALARMS_FILE
from klamp.errors import UnsupportedVersion
from klamp.training.folders import ANSWERS, COMPLETIONS, CONFIG, METRICS_FILE, SUMMARY, VERSIONS

SIGN = ".ray"
"""File in the ablation's folder: a worker that reads the ablation's own sign there sees the same disk."""

LOG = "log.txt"
RESULTS = (CONFIG, VERSIONS, METRICS_FILE, COMPLETIONS, ANSWERS, ALARMS_FILE, SUMMARY, OUTCOME, LOG)
"""Names of the files that travel back, and the only names that are written."""
WORKER = "worker.json"
"""The file that says where the run ran and where its checkpoints stayed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker needs to know about a run."""

    run: Mapping[str, Any]
    """The run as plain data, see `klamp.ablation.plan.plain_run`."""
    folder: str
    """The ablation's folder, on the machine that started it."""
    sign: str
    """The random text in the file `SIGN` of that folder."""
    parcels: Parcels
    """Files that the run may need."""
    threads: int
    """How many threads torch may use."""
    version: str = __version__
    """The version of klamp where the ablation was started."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that a worker sends back about a run."""

    host: str
    """The name of the worker's machine."""
    folder: str
    """Where the run's checkpoints are, on that machine."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """File name -> content; none where the driver sees the same folder."""


class Post:
    """A Ray actor that keeps the reports of workers until the driver takes them."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.begun: dict[str, int] = {}

    def begin(self, run: str) -> None:
        """Note that a worker begins a run; where an earlier worker died, the run is begun again."""
        self.begun[run] = self.begun.get(run, 0) + 1
        text = f"its worker died; attempt {self.begun[run]}" if self.begun[run] > 1 else ""
        self.updates.append(Update(run=run, state="running", text=text))

    def put(self, update: Update) -> None:
        """Keep a report about a run."""
        self.updates.append(update)

    def take(self) -> list[Update]:
        """The reports since the last call, in their order."""
        taken, self.updates = self.updates, []
        return taken


def work(job: Job, post: Any) -> Result:
    """Do one run on a worker and return its result.

    Args:
        job: what to do.
        post: handle of the `Post` actor.

    Raises:
        UnsupportedVersion: the worker has another version of klamp than the driver.
        KeyboardInterrupt, TrainingStopped: the task was cancelled; the run's state is saved.
    """
    import ray
    import torch
    from transformers.utils.logging import disable_progress_bar

    _check_version(job)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what Ray raises in a task that is cancelled
    disable_progress_bar()
    torch.set_num_threads(job.threads)
    ray.get(post.begin.remote(job.run["name"]))  # waited for: a worker that dies at once has been counted
    folder, shared = working_folder(job)
    config = unpack_all(job.run["config"], job.parcels, ray.get)
    run = run_of({**job.run, "config": config})
    own = run_folder(folder, run)
    write_run(own, run)
    with alone(own), _logged(own / LOG):
        perform(run, folder, post.put.remote)
    return packed_result(own, shared=shared)


def _check_version(job: Job) -> None:
    if job.version != __version__:
        raise UnsupportedVersion(
            "the worker has another version of klamp",
            got=f"{__version__} on {socket.gethostname()}, {job.version} where the ablation was started",
            why="runs of two versions are not comparable",
            fix=f"install klamp=={job.version} on every node of the cluster",
        )


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    """A context in which log messages are written to a file of the run too."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def working_folder(job: Job) -> tuple[Path, bool]:
    """The folder in which the worker works, and whether it is the ablation's own folder."""
    given = Path(job.folder)
    try:
        if (given / SIGN).read_text(encoding="utf-8") == job.sign:
            return given, True
    except OSError:
        pass
    own = Path(tempfile.gettempdir()) / f"klamp-{os.getuid()}-{job.sign}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own, False


def packed_result(own: Path, *, shared: bool) -> Result:
    """The files of a run's folder that travel back; none where the driver sees the same disk."""
    files = {} if shared else {name: (own / name).read_bytes() for name in RESULTS if (own / name).is_file()}
    return Result(host=socket.gethostname(), folder=str(own), files=files)


def keep_result(result: Result, own: Path) -> None:
    """Write the files that came back into the run's folder; only the names in `RESULTS` are accepted.

    Args:
        result: of a worker.
        own: the run's folder.
    """
    if not result.files:
        return
    own.mkdir(parents=True, exist_ok=True)
    for name in (name for name in RESULTS if name in result.files):
        (own / name).write_bytes(result.files[name])
    where = {"host": result.host, "folder": result.folder}
    (own / WORKER).write_text(json.dumps(where, indent=2), encoding="utf-8")


def job_of(run: Run, *, folder: Path, sign: str, parcels: Parcels, threads: int) -> Job:
    """The job of a run."""
    return Job(
        run=plain_run(run),
        folder=str(folder.absolute()),
        sign=sign,
        parcels=parcels,
        threads=threads,
    )
