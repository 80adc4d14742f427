"""verl's program as a child of klamp: a session of its own, its output in a file, its end made sure of."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SHOWN_LINES = 20
"""How much of the end of the output an error quotes."""

GRACE = 20.0
"""Seconds that processes have to end by themselves once they are asked to."""

POLL = 0.05


class Child:
    """A program in a session of its own, which is over when the context is left.

    Ray gives its processes groups of their own, within the session of the program that started them: it is the session
    that is ended.

    Args:
        words: the command.
        output: the file that all of it prints into.
    """

    def __init__(self, words: Sequence[str], output: Path) -> None:
        self.words, self.output = list(words), output
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        """Start it."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End whatever of it still runs."""
        self.end()

    @property
    def code(self) -> int | None:
        """What the program returned; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def end(self) -> None:
        """Ask all processes of the session to end, wait, and kill those that do not."""
        assert self.process is not None
        self._signal(signal.SIGTERM)
        until = time.monotonic() + GRACE
        try:
            while self._left() and time.monotonic() < until:
                time.sleep(POLL)
        finally:  # also at a second Ctrl-C
            self._signal(signal.SIGKILL)
            self.process.wait()
            until = time.monotonic() + GRACE  # a killed process takes a moment to be gone
            while self._left() and time.monotonic() < until:
                time.sleep(POLL)

    def last_lines(self) -> str:
        """The end of what it printed."""
        try:
            lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-SHOWN_LINES:])

    def _left(self) -> list[int]:
        """The processes of the session that still run."""
        assert self.process is not None
        self.process.poll()  # so that it does not stay behind as a zombie
        return members(self.process.pid)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._left():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def members(session: int) -> list[int]:
    """The processes of a session that have not ended, as Linux lists them; zombies are over.

    Args:
        session: the id of the process that opened it.
    """
    found: list[int] = []
    for each in Path("/proc").iterdir():
        if not each.name.isdigit():
            continue
        try:
            after_name = (each / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[3]) == session and after_name[0] not in "ZX":
            found.append(int(each.name))
    return found
