"""The file that --output names: only what klamp wrote is written over, and what cannot be written is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from klamp.errors import RunFolderError

LOOKED_AT = 2000
"""Characters of a file by whose beginning it is known."""


def check_output(
    file: Path, *, example: str, refused: str, is_one: Callable[[str], bool], of: str = "--output"
) -> None:
    """Refuse to write over a file that is of another kind.

    Args:
        file: where to write.
        example: a name that the file could have in a folder.
        refused: the message where the file is of another kind.
        is_one: whether a text that begins so is of this kind.
        of: whose folder is missing, in the message on that.

    Raises:
        RunFolderError: the file exists and is of another kind, or its folder does not exist.
    """
    if not file.parent.is_dir():
        raise RunFolderError(f"the folder of {of} does not exist", got=str(file.parent), fix="make it first")
    if file.is_dir():
        raise RunFolderError("--output names a folder", got=str(file), fix=f"--output {file / example}")
    if file.is_file() and not is_one(file.read_text(encoding="utf-8", errors="replace")[:LOOKED_AT]):
        raise RunFolderError(refused, got=str(file), why="it would be written over", fix="choose another --output")


def write_output(file: Path, text: str, *, what: str) -> None:
    """Write a text.

    Args:
        file: where to.
        text: what.
        what: its name in the message, such as `the report`.

    Raises:
        RunFolderError: the system refuses.
    """
    try:
        file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunFolderError(
            f"{what} cannot be written",
            got=str(file),
            why=error.strerror or f"{type(error).__name__}: {error}",
            fix="choose another --output",
        ) from error
