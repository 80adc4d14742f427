"""Files that are there completely or not at all, whenever a process is killed or a machine loses power."""

from __future__ import annotations

import os
from pathlib import Path


def part_of(file: Path) -> Path:
    """Where a file or folder is written before it is moved to its place."""
    return file.with_name(f".{file.name}.part")


def write_whole(file: Path, text: str) -> None:
    """Write a text beside a file and move it to its place.

    Args:
        file: is replaced if it is there.
        text: its new content.
    """
    part = part_of(file)
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; not on Windows, which opens no folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
