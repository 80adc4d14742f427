"""Stands between klamp and verl's program: starts it, and ends all of its session once klamp is gone, however it went.

Run as a file, so that it loads no library. Its standard input brings the command and the patience as a line of JSON,
and ends when klamp does: also when klamp is killed, and can end nothing itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

POLL = 0.05


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


def _others() -> list[int]:
    """The processes of this one's session, without itself."""
    return [pid for pid in members(os.getsid(0)) if pid != os.getpid()]


def main() -> None:
    """Run the command; end as it ends."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # asked with all others of the session, it ends after its program
    told = json.loads(sys.stdin.buffer.readline())
    program = subprocess.Popen(told["words"], stdin=subprocess.DEVNULL)
    while program.poll() is None:
        if select.select([sys.stdin], [], [], POLL)[0]:  # nothing more is written there: klamp is gone
            end(_others, told["grace"])
    code = program.returncode
    sys.exit(code if code >= 0 else 128 - code)  # of a signal, as shells have it


if __name__ == "__main__":
    main()
