"""The lock on a folder that one process at a time may write, which the library filelock takes.

The operating system holds the lock and lets go of it when the process ends, however it ends. The file says who has it,
for the message alone.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from klamp.errors import RunFolderError

LOCK = ".lock"
"""The file in the folder."""

_held: set[int] = set()


@contextmanager
def held(folder: Path, *, by: str) -> Iterator[None]:
    """A context in which no other process can take the folder, which is there.

    Args:
        folder: of a run or an ablation.
        by: the command, as a person knows it.

    Raises:
        RunFolderError: another one has it; says which process, on which host, and since when. Or there are no locks.
    """
    from filelock import FileLock, Timeout  # part of the extra `train`; who only reads a run needs no lock

    path, process = folder / LOCK, os.getpid()
    descriptors: list[int] = []

    def sign(descriptor: int) -> None:
        descriptors.append(descriptor)
        with suppress(OSError):  # a full disk: the run that cannot be written says so
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_holder(by)).encode())

    lock = FileLock(path, on_acquired=sign)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise _refused(path) from error
    except OSError as error:
        raise _without_locks(path, error) from error
    _held.update(descriptors)
    try:
        yield
    finally:
        if os.getpid() == process:  # else this is a fork, which filelock has taken the lock from
            _held.difference_update(descriptors)
            with suppress(OSError):  # the folder may be gone
                path.unlink(missing_ok=True)  # while it is locked: whoever opened it meanwhile tries again
            with suppress(OSError):
                lock.release()


def descriptors() -> list[int]:
    """The file descriptors of the locks that this process holds: a child that inherits them holds the folders too."""
    return list(_held)


def _holder(by: str) -> dict[str, Any]:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"command": by, "process": os.getpid(), "host": socket.gethostname(), "since": since}


def _refused(path: Path) -> RunFolderError:
    holder: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):  # it is just being written
        found = json.loads(path.read_text(encoding="utf-8"))
        holder = found if isinstance(found, dict) else {}
    who = f", held by process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}"
    return RunFolderError(
        f"another {holder.get('command', 'process')} works in the output folder",
        got=f"{path.parent}{who if holder else ''}",
        why="both would write the same files",
        fix="wait for it, stop it, or choose another --output_dir",
    )


def _without_locks(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        "the output folder cannot be locked",
        got=f"{path.parent}: {error}",
        why="two runs that write the same files would not notice each other",
        fix="choose an --output_dir on a file system that has locks",
    )
