"""Ctrl-C, SIGTERM and SIGHUP during a run: the first waits for the end of the step, the second does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANGUP = getattr(signal, "SIGHUP", None)  # none on Windows
ENDS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)
"""The signals that end a run."""


class Interrupt:
    """Notes the first signal, so that the step under way ends whole; raises at the second."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def deferred_interrupts() -> Iterator[Interrupt]:
    """Let signals end a run after the step under way; a SIGHUP that is ignored, as `nohup` does, stays ignored."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    caught = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN or number != HANGUP]
    previous = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
