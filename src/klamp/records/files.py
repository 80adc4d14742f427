"""Reading JSON and JSONL files, with one error for what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from klamp.errors import DataError
from klamp.tasks.files import json_of

FORMATS = (
    "a klamp run folder, TRL's trainer_state.json, a TensorBoard folder, a W&B offline run, verl's file log, "
    "JSONL of metrics or of completions with token log-probabilities"
)


def unreadable(what: str, path: Path, *, why: str, fix: str = "") -> DataError:
    """The error for a record that cannot be read."""
    return DataError(what, got=str(path), why=why, fix=fix or f"klamp doctor reads {FORMATS}")


def json_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        DataError: it is not one.
    """
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise unreadable("a file is not JSON", path, why=str(error)) from error
    if not isinstance(found, dict):
        raise unreadable("a file holds no JSON object", path, why=f"it holds a {type(found).__name__}")
    return found


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects in a JSONL file; a half-written last line, which a killed run leaves, is ignored.

    Raises:
        DataError: another line is not an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise unreadable("a file is not text", path, why=str(error)) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json_of(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise unreadable(f"line {number} is not JSON", path, why=str(error)) from error
        if not isinstance(row, dict):
            raise unreadable(f"line {number} is no JSON object", path, why=f"it is a {type(row).__name__}")
        rows.append(row)
    return rows
