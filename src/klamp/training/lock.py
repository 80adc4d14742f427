"""The lock on a folder that one process at a time may write: who holds it, and how it passes on from the dead.

The operating system holds the lock (flock) and lets go of it when the process ends, however it ends. The file beside it
says who it is, for the message alone. Where a file system has no locks, or the system no flock (Windows), what the file
says is all there is to go by.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from klamp.errors import RunFolderError

LOCK = ".lock"
"""The file in the folder."""
TAKEN = (errno.EAGAIN, errno.EACCES)
"""What a file system answers where another process has the lock; all else means that it has no locks."""

_held: set[IO[bytes]] = set()


def _let_go() -> None:
    """Close the copies that a fork brings along: a child that outlives this process is not to hold its folders."""
    for file in _held:
        file.close()
    _held.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(folder: Path, *, by: str) -> Iterator[None]:
    """A context in which no other process can take the folder, which is there.

    Args:
        folder: of a run or an ablation.
        by: the command, as a person knows it.

    Raises:
        RunFolderError: another one has it; says which process, on which host, and since when.
    """
    path = folder / LOCK
    file = _taken(path)
    _held.add(file)
    try:
        with suppress(OSError):  # a full disk: the run that cannot be written says so
            file.truncate(0)
            file.write(json.dumps(_holder(by)).encode())
            file.flush()
        yield
    finally:
        if file in _held:  # else this is a fork
            _held.discard(file)
            with suppress(OSError):  # the folder may be gone
                path.unlink(missing_ok=True)
            with suppress(OSError):
                file.close()
            if os.name == "nt":  # where no open file can be deleted
                with suppress(OSError):
                    path.unlink(missing_ok=True)


def descriptors() -> list[int]:
    """The file descriptors of the locks that this process holds: a child that inherits them holds the folders too."""
    return [file.fileno() for file in _held]


def flock(file: IO[bytes], *, wait: bool) -> None:
    """Have the operating system lock a file for this process, until it is closed.

    Args:
        file: open.
        wait: whether for a process that has the lock, however long.

    Raises:
        OSError: another process has it (`TAKEN`), or there are no locks here.
    """
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError(errno.ENOLCK, "this system has no flock") from error
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _taken(path: Path) -> IO[bytes]:
    """The file of the lock, open and locked by this process."""
    while True:
        file = path.open("a+b")
        try:
            flock(file, wait=False)
        except OSError as error:
            found = _read(file)
            if error.errno in TAKEN or _may_live(found):
                file.close()
                raise _refused(path, found, locks=error.errno in TAKEN) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its holder let go of it and took it away in between


def _holder(by: str) -> dict[str, Any]:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"command": by, "process": os.getpid(), "host": socket.gethostname(), "since": since}


def _read(file: IO[bytes]) -> dict[str, Any]:
    """Who holds the lock; nothing where that is just being written."""
    file.seek(0)
    with suppress(ValueError, RecursionError):
        found = json.loads(file.read())
        if isinstance(found, dict):
            return found
    return {}


def _may_live(holder: dict[str, Any]) -> bool:
    """Whether a process that the file names may be at work still: of another host, or on Windows, nobody can tell."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname() or os.name == "nt":  # where signal 0 is Ctrl-C, and no question
        return True
    try:
        os.kill(int(holder["process"]), 0)
    except PermissionError:
        return True
    except (KeyError, TypeError, ValueError, OSError, OverflowError):
        return False
    return True


def _refused(path: Path, holder: dict[str, Any], *, locks: bool) -> RunFolderError:
    who = f", held by process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}"
    fix = "wait for it, stop it, or choose another --output_dir"
    return RunFolderError(
        f"another {holder.get('command', 'process')} works in the output folder",
        got=f"{path.parent}{who if holder else ''}",
        why="both would write the same files",
        fix=fix if locks else f"{fix}; if it is dead, delete {path}: this file system has no locks that would say so",
    )
