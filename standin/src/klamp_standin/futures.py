"""Requests that are answered later: one worker does them, those of a training run in the order of their numbers."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from klamp_standin.protocol import Refused

Result = bytes | dict[str, Any]
KEPT = 4096
"""How many results are kept for clients that ask again."""


@dataclass
class Future:
    """The result of a request, once there is one."""

    done: threading.Event = field(default_factory=threading.Event)
    result: Result = b""
    ready_at: float = 0.0
    """Clock time before which the result is held back, for a slow server."""

    def wait(self, seconds: float) -> Result | None:
        """Wait for the result; None if it is not there after so many seconds."""
        end = time.monotonic() + seconds
        if not self.done.wait(seconds) or self.ready_at > end:
            time.sleep(max(0.0, end - time.monotonic()))
            return None
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        return self.result


class Lane:
    """The requests of one training run; they are done in the order of their numbers, however they arrive."""

    def __init__(self, first: int) -> None:
        self.next, self.waiting = first, dict[int, Callable[[], None]]()


class Worker:
    """A thread that does the requests; a request that is sent twice is done once."""

    def __init__(self) -> None:
        self.futures: OrderedDict[str, Future] = OrderedDict()
        self.lanes: dict[str, Lane] = {}
        self.lock = threading.Lock()
        self.jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True, name="tinker-standin-worker")
        self.thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: on models as small as these more of them only wait for each other
        while (job := self.jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Stop the thread after its present job."""
        self.jobs.put(None)
        self.thread.join(timeout=30)

    def submit(
        self, request_id: str, job: Callable[[], Result], *, lane: str | None = None, number: int = 0, late: float = 0.0
    ) -> str:
        """Hand over a job, whose result is kept under this id.

        Args:
            request_id: the same for the same request, so that a retry finds the first one's result.
            job: gives the result, or raises.
            lane: training run whose order it keeps; None: no order.
            number: place in that order.
            late: seconds that the result is held back.
        """
        with self.lock:
            if request_id in self.futures:
                return request_id
            future = self.futures[request_id] = Future(ready_at=time.monotonic() + late if late else 0.0)
            while len(self.futures) > KEPT:
                self.futures.popitem(last=False)
            self._place(lane, number, lambda: _carry_out(job, future))
        return request_id

    def skip(self, lane: str, number: int) -> None:
        """Count a refused request as done, so that later ones need not wait for it."""
        with self.lock:
            if lane in self.lanes:
                self._place(lane, number, lambda: None)

    def _place(self, lane: str | None, number: int, job: Callable[[], None]) -> None:
        if lane is None:
            self.jobs.put(job)
            return
        queued = self.lanes[lane]
        queued.waiting[number] = job
        while queued.next in queued.waiting:
            self.jobs.put(queued.waiting.pop(queued.next))
            queued.next += 1

    def wait(self, request_id: str, seconds: float) -> Result | None:
        """Wait for the result of a request; None if it is not there in time.

        Raises:
            Refused: there was no such request.
        """
        future = self.futures.get(request_id)
        if future is None:
            raise Refused(f"there is no request {request_id!r}", status=404)
        return future.wait(seconds)


def _carry_out(job: Callable[[], Result], future: Future) -> None:
    try:
        future.result = job()
    except Refused as error:
        future.result = {"error": str(error), "category": "user"}
    except Exception as error:  # whatever it is, the client is told and the worker goes on
        future.result = {"error": f"{type(error).__name__}: {error}", "category": "server"}
    future.done.set()
