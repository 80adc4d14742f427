"""The checksums of a checkpoint: noted once its files are on the disk, held against them before a run goes on from it.

klamp's own checkpoints note them in their state.json. Those of TRL and verl get a file of their own beside what is in
them; where it is, the checkpoint was complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from klamp.tasks.cache import make_readable
from klamp.training.whole_files import sync, write_whole

SEAL = "checksums.json"
"""The file in a checkpoint of TRL or verl."""


def checksums(folder: Path) -> dict[str, str]:
    """Path inside the folder -> SHA-256, for each of its files."""
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    return {file.relative_to(folder).as_posix(): _checksum(file) for file in files}


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def changed(folder: Path, noted: Mapping[str, str]) -> list[str]:
    """The files of a checkpoint that are not those that were written; one that came later is none of them.

    Args:
        folder: of the checkpoint.
        noted: their checksums.
    """
    files = {name: folder / name for name in noted}
    return [name for name, file in files.items() if not file.is_file() or _checksum(file) != noted[name]]


def sync_all(folder: Path) -> None:
    """Wait until a folder and everything in it is on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def seal(folder: Path) -> None:
    """Note the checksums of a checkpoint that is complete, once it is on the disk."""
    make_readable(folder)
    sync_all(folder)
    write_whole(folder / SEAL, json.dumps(checksums(folder), indent=2))


def sealed(folder: Path) -> dict[str, str]:
    """The checksums that were noted.

    Raises:
        OSError, ValueError: there are none, or they cannot be read.
    """
    found = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{SEAL} holds no checksums")
    return found
