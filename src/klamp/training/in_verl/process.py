"""verl's program as a child of klamp: a session of its own, its output in a file, its end made sure of.

Run as a file (without klamp or any other library), this module stands between the two: it starts the program, and ends
all of its session once klamp is gone, also when klamp is killed, and can end nothing itself. Its standard input brings
the command and the patience as a line of JSON, and ends when klamp does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType

POLL = 0.05

SHOWN_LINES = 20
"""How much of the end of the output an error quotes."""

GRACE = 20.0
"""Seconds that processes have to end by themselves once they are asked to."""


class Child:
    """A program in a session of its own, which is over when the context is left.

    Ray gives its processes groups of their own, within the session of the program that started them: it is the session
    that is ended, by the process that leads it where this process is killed.

    Args:
        words: the command.
        output: the file that all of it prints into.
    """

    def __init__(self, words: Sequence[str], output: Path) -> None:
        self.words, self.output = list(words), output
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        """Start it."""
        from klamp.training.folders import (
            lock_descriptors,  # here, for this file also runs where klamp cannot be imported
        )

        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=lock_descriptors(),  # the folder stays locked until the last of its processes has ended
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
            end(self._left, GRACE)
        finally:
            self.process.wait()
            self.process.stdin.close()
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


def members(session: int) -> list[int]:
    """The processes of a session that have not ended, as Linux lists them; zombies are over.

    Args:
        session: the id of the process that opened it.
    """
    running: list[int] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            after_name = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(after_name[3]) == session and after_name[0] not in "ZX":
            running.append(int(process.name))
    return running


def end(left: Callable[[], Collection[int]], grace: float) -> None:
    """Ask processes to end, wait, and kill those that do not.

    Args:
        left: those of them that still run.
        grace: seconds that they have to end by themselves.
    """
    _signal(left(), signal.SIGTERM)
    until = time.monotonic() + grace
    try:
        while left() and time.monotonic() < until:
            time.sleep(POLL)
    finally:  # also at a second Ctrl-C
        _signal(left(), signal.SIGKILL)


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def main() -> None:
    """Run the command; end as it ends."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # asked with all others of the session, it ends after its program
    told = json.loads(sys.stdin.buffer.readline())
    program = subprocess.Popen(told["words"], stdin=subprocess.DEVNULL)
    while program.poll() is None:
        if select.select([sys.stdin], [], [], POLL)[0]:  # nothing more is written there: klamp is gone
            end(lambda: [pid for pid in members(os.getsid(0)) if pid != os.getpid()], told["grace"])
    code = program.returncode
    sys.exit(code if code >= 0 else 128 - code)  # of a signal, as shells have it


if __name__ == "__main__":
    main()
