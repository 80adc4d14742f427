"""Watches over the processes of a run: none waits for ever for one that died or hangs, none outlives its launcher.

Once a second every process writes down that it lives, where in the run it is, and whether it waits for the others: in
the store through which they found each other. One whose wait is in vain, because a connection broke or
`process_timeout` is over, reads there whom it waited for.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from accelerate import PartialState
from torch.distributed import DistError, DistNetworkError, PrefixStore, Store, TCPStore

from klamp.errors import KlampError, TrainerFailed
from klamp.training.config import TrainConfig
from klamp.training.folders import checkpoint_folders

Said = TypeVar("Said")

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = 6.0
"""Seconds without a sign of life after which a process counts as gone; and that others have to say that they wait."""
SAY = 30.0
"""Seconds that a process waits for others before it says for whom."""
LOST = "waited in vain"
"""How a process ends that lost another one."""

log = logging.getLogger("klamp.training.peers")
_runs = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a process says of itself."""

    beat: int = 0
    """Rises while it lives."""
    where: str = "loading"
    """Where in the run it is."""
    seconds: float = 0.0
    """Since when."""
    waits: bool = False
    """Whether it waits for the others."""
    end: str = ""
    """How it left the run; "" while it is there."""
    process: str = ""
    """Its number, and the host."""


class Peers:
    """The processes of a run, as one of them sees them.

    Args:
        rank: the number of this one.
        count: how many there are.
        timeout: the longest that one may wait for another, in seconds.
        store: where they write; None: this one is alone, or cannot reach it.
    """

    def __init__(self, rank: int = 0, count: int = 1, *, timeout: float = 0.0, store: Store | None = None) -> None:
        self.rank, self.count, self.timeout, self.store = rank, count, timeout, store
        self.keys = [f"{each}" for each in range(count)]
        self.sign = Sign(process=f"process {os.getpid()} on {socket.gethostname()}")
        self.since, self.step = time.monotonic(), 0
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # else it may be a shell that ends
        self.force_at = float("inf")
        self.said = False
        self.cut: DistNetworkError | None = None
        self._lock, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="klamp-peers")

    def at(self, where: str, *, step: int | None = None) -> None:
        """Note where in the run this process is from now on; in the step that was named last."""
        self.step = self.step if step is None else step
        self._change(where=f"step {self.step}: {where}" if self.step else where)
        with suppress(RuntimeError):  # whoever waits for a store that is gone notices by itself
            self._beat()

    def _change(self, **changes: object) -> None:
        with self._lock:
            self.since = time.monotonic()
            self.sign = replace(self.sign, seconds=0.0, **changes)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this process waits for the others."""
        self._change(waits=True)
        try:
            yield
        finally:
            self._change(waits=False)
            self.said = False

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A context in which a wait in vain is an error that names whom this process waited for.

        Raises:
            TrainerFailed: a process is gone, hangs, or has left the run.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or isinstance(error, KlampError) or not is_wait_in_vain(error):
                raise
            raise self._lost(error) from error

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context in which this process tells the others of itself, and ends when its launcher is gone."""
        if self.store is not None or self.parent is not None:
            self._thread.start()
        try:
            yield
        except BaseException as error:
            self._leave(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise
        else:
            self._leave("it was done")
        finally:
            self._over.set()

    def others(self) -> dict[int, Sign]:
        """What the other processes said last.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        if self.store is None or not self._asked(self.store.check, self.keys):
            return {}
        signs = [Sign(**json.loads(each)) for each in self._asked(self.store.multi_get, self.keys)]
        return {rank: sign for rank, sign in enumerate(signs) if rank != self.rank}

    def _beat(self) -> None:
        with self._lock:
            self.sign = replace(self.sign, beat=self.sign.beat + 1, seconds=time.monotonic() - self.since)
            if self.store is not None:
                self._asked(self.store.set, self.keys[self.rank], json.dumps(asdict(self.sign)))

    def _asked(self, ask: Callable[..., Said], *given: object) -> Said:
        """What the store answers; not asked again once the connection is cut, for torch prints a stack each time.

        Raises:
            RuntimeError: it cannot be reached.
        """
        if self.cut is not None:
            raise RuntimeError(str(self.cut)) from self.cut
        try:
            return ask(*given)
        except DistNetworkError as error:
            self.cut = error
            raise

    def _leave(self, how: str) -> None:
        """Tell how this process left; the first reason stands."""
        with suppress(RuntimeError):
            self.sign = replace(self.sign, end=self.sign.end or how)
            self._beat()

    def _watch(self) -> None:
        """What the thread does: it must never be what ends a run that goes on."""
        while not self._over.wait(BEAT):
            self._mind_the_launcher()
            with suppress(RuntimeError):
                self._beat()
                found = self.others()
                self._say(found)
                if not self.sign.end and any(sign.end == LOST for sign in found.values()):
                    self._end_by_force_later()
            if time.monotonic() > self.force_at:
                log.critical("klamp: process %d ends: the run is over, and it hangs in: %s", self.rank, self.sign.where)
                os._exit(1)

    def _mind_the_launcher(self) -> None:
        if self.parent is None or os.getppid() == self.parent:
            return
        self.parent = None
        log.critical("klamp: the launcher is gone: process %d ends, after the step under way if it can", self.rank)
        os.kill(os.getpid(), signal.SIGTERM)
        self._end_by_force_later()

    def _end_by_force_later(self) -> None:
        self.force_at = min(self.force_at, time.monotonic() + self.timeout)

    def _say(self, found: dict[int, Sign]) -> None:
        """Say once for whom this process waits, where it does so for long."""
        if self.said or not self.sign.waits or self.sign.seconds < SAY or self.sign.end:
            return
        self.said = True
        busy = [
            f"process {rank} ({sign.where}, for {sign.seconds:.0f} s)" for rank, sign in found.items() if not sign.waits
        ]
        if busy:
            log.warning(
                "klamp: process %d waits for %s; the run ends after %g s of it",
                self.rank,
                ", ".join(busy),
                self.timeout,
            )

    def _lost(self, error: RuntimeError) -> TrainerFailed:
        """The error of a wait in vain."""
        self._leave(LOST)
        found = self._missing()
        hangs = any("hangs" in words for words in found)
        raises = f"raise process_timeout if a process may take longer than {self.timeout:g} s" if hangs else ""
        return TrainerFailed(
            "a process of the run is missing" if found else "the processes of the run lost each other",
            got="; ".join(found) or str(error).partition("\n")[0],
            why=f"process {self.rank} waited for it, and cannot go on without",
            fix=raises or "see what that process printed, and whether its machine ran out of memory; then --resume",
        )

    def _missing(self) -> list[str]:
        """Each process that is the reason, in words; those that wait themselves are not."""
        try:
            first, until = self.others(), time.monotonic() + PATIENCE
            found = first
            while time.monotonic() < until and not any(_has_left(sign) for sign in found.values()):
                time.sleep(BEAT / 4)
                found = self.others()
        except RuntimeError:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return ["the launcher is gone" if agent else "process 0 is gone, through which the others found each other"]
        left = {rank: f"left the run: {sign.end}" for rank, sign in found.items() if _has_left(sign)}
        return [
            f"process {rank} of {self.count} ({found[rank].process}) {words}; it was in: {found[rank].where}"
            for rank, words in (left or _stuck(first, found)).items()
        ]


def _has_left(sign: Sign) -> bool:
    return sign.end not in ("", LOST)


def _stuck(first: dict[int, Sign], last: dict[int, Sign]) -> dict[int, str]:
    """The processes that gave no sign of life between two looks, or hang; in words."""
    found = {rank: "is gone: it gives no sign of life" for rank in last if last[rank].beat == first[rank].beat}
    for rank, sign in last.items():
        if rank not in found and not sign.waits and sign.end != LOST:
            found[rank] = f"hangs: alive, and no further for {sign.seconds:.0f} s"
    return {rank: words for rank, words in found.items() if last[rank].end != LOST}


def is_wait_in_vain(error: Exception) -> bool:
    """Whether an error is that of a wait for another process; gloo has no class of its own, but names its files."""
    return isinstance(error, DistError) or "gloo" in str(error)


def timeout_of(config: TrainConfig) -> timedelta:
    """The longest wait for another process, as torch takes it."""
    return timedelta(seconds=config.run.process_timeout)


@contextmanager
def watched(config: TrainConfig, folder: Path) -> Iterator[Peers]:
    """A context in which the processes of a run watch over each other.

    Args:
        config: of the run.
        folder: of the run.

    Raises:
        TrainerFailed: one of them is gone, hangs, or has left the run; names it, and the newest checkpoint.
    """
    state = PartialState()
    store = _store() if state.num_processes > 1 else None
    peers = Peers(state.process_index, state.num_processes, timeout=config.run.process_timeout, store=store)
    with peers.watch():
        try:
            with peers.explaining():
                yield peers
        except TrainerFailed as error:
            if not getattr(error, "__notes__", ()):
                saved = checkpoint_folders(folder)
                error.add_note(f"  the newest checkpoint is {saved[-1]}" if saved else "  no step was saved yet")
            raise


def _store() -> Store | None:
    """A connection of one's own to the store through which the processes found each other; None: there is none."""
    run = f"klamp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_runs)}"
    with suppress(RuntimeError, KeyError, ValueError):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        found = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        return PrefixStore(run, found)
    return None
