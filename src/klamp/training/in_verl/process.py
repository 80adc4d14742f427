"""verl's program as a child of klamp: a session of its own, its output in a file, its end made sure of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from klamp.training.in_verl import guard
from klamp.training.lock import descriptors

SHOWN_LINES = 20
"""How much of the end of the output an error quotes."""

GRACE = 20.0
"""Seconds that processes have to end by themselves once they are asked to."""


class Child:
    """A program in a session of its own, which is over when the context is left.

    Ray gives its processes groups of their own, within the session of the program that started them: it is the session
    that is ended, by the guard that leads it where this process is killed.

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
                [sys.executable, "-I", "-S", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=descriptors(),  # the folder stays locked until the last of its processes has ended
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"words": self.words, "grace": GRACE}).encode() + b"\n")
        self.process.stdin.flush()
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
        assert self.process is not None and self.process.stdin is not None
        try:
            guard.end(self._left, GRACE)
        finally:
            self.process.wait()
            self.process.stdin.close()
            until = time.monotonic() + GRACE  # a killed process takes a moment to be gone
            while self._left() and time.monotonic() < until:
                time.sleep(guard.POLL)

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
        return guard.members(self.process.pid)
