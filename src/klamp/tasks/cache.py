"""The cache of models that klamp makes itself: a folder is there as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE

from klamp.errors import ModelError

Progress = Callable[[str, int, int, float | None], None]
"""Called while a model is made, as `progress(what, done, total, loss)`; the loss is None where there is none."""


def cache_root() -> Path:
    """The folder of all cached models: `KLAMP_CACHE`, else `~/.cache/klamp`."""
    return Path(os.environ.get("KLAMP_CACHE") or Path.home() / ".cache" / "klamp").expanduser()


def stored(folder: Path, write: Callable[[Path], None]) -> Path:
    """A folder of the cache, which is filled first where it is not there; a killed run leaves no half model in it.

    Args:
        folder: what it is called in the end; where another process is quicker, its folder stays.
        write: fills the empty folder that it is given.

    Raises:
        ModelError: the cache cannot be written; known before `write` is called.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            "the cache folder for models cannot be written",
            got=str(folder.parent),
            why=str(error),
            fix="set KLAMP_CACHE to a folder that can be written",
        ) from error
    try:
        write(temporary)
        make_readable(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was quicker: its folder holds the same model
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def make_readable(folder: Path) -> None:
    """Give a folder and all in it the permissions that new files have here, besides those that they have.

    safetensors writes files, and tempfile makes folders, that nobody else can read, whatever the umask says.
    """
    probe = folder / ".umask"
    probe.mkdir()
    usual = S_IMODE(probe.stat().st_mode)  # the umask itself is told only to who sets it, for all threads
    probe.rmdir()
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            with suppress(PermissionError):  # of another user: it stays as it is
                path.chmod(S_IMODE(path.stat().st_mode) | (usual if path.is_dir() else usual & 0o666))


@contextmanager
def without_bars() -> Iterator[None]:
    """A context in which transformers shows no progress bars: a library does not print."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
