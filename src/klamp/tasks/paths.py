"""Paths that users name: `~` is their home folder, and what is read has an end."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def at_home(name: str | Path) -> Path:
    """The path that a name stands for: `~` is the home folder; `~nobody` stays as it is."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def followed(path: Path) -> Path:
    """The path behind all links; links in a circle stay as they are, and fail where they are read."""
    return Path(os.path.realpath(path))


def with_end(path: Path) -> Path:
    """A path that may be read: a file, a folder, or nothing.

    Raises:
        OSError: it is a pipe or a device, which may have no end.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, which may have no end", str(path))
    return path
