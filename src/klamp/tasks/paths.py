"""Paths that users name: `~` is their home folder, and what is read has an end."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def at_home(name: str | Path) -> Path:
    """The path that a name stands for, with the home folder in the place of `~`; one of nobody stands as it is."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def followed(path: Path) -> Path:
    """The path behind all links; links in a circle are left as they are, for whoever reads there to say so."""
    return Path(os.path.realpath(path))


def with_end(path: Path) -> Path:
    """A path that may be read: of a file, a folder, or nothing, for its reader to say so.

    Raises:
        OSError: it is a pipe or a device, from which more may come for ever, or nothing.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device, which may have no end", str(path))
    return path
