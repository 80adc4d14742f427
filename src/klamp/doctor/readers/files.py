"""What all readers of records share: reading a file, the error for one that cannot be read, names for a record."""

from __future__ import annotations

import io
import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from klamp.errors import ConfigError, DataError
from klamp.files import json_of, with_end, yaml_of

Read = TypeVar("Read")

FORMATS = (
    "a klamp run folder, TRL's trainer_state.json (in each checkpoint-N), a "
    "TensorBoard folder, a W&B offline run (of another: the chart's CSV, or its history as JSONL), verl's file log "
    "(trainer.logger=[console,file]), lines that a trainer printed (values after each step), a table as text, JSONL of "
    "metrics or of completions with token log-probabilities"
)

TOKEN_LISTS = "completions: lists old_log_probs and ref_log_prob (also rollout_log_probs), one number per token"
DAMAGED = "line {} is damaged"
COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\3\4": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
"""The first bytes of a compressed file -> its format."""


def unreadable(what: str, path: Path, *, why: str, fix: str = "") -> DataError:
    """The error for a record that cannot be read."""
    return DataError(what, got=str(path), why=why, fix=fix or f"klamp doctor reads {FORMATS}")


def object_in(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file, or the names and values in a YAML file; a DataError if the file has neither."""
    yaml = path.suffix == ".yaml"
    parse, kind, holds = (yaml_of, "YAML", "names with values") if yaml else (json_of, "JSON", "JSON object")
    try:
        values = parse("".join(text_lines(path)))
    except (ValueError, RecursionError) as error:
        raise unreadable(f"a file is not {kind}", path, why=shortened(error)) from error
    if isinstance(values, list) and not yaml:  # what json.dump(trainer.state.log_history) writes
        values = {"log_history": values}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise unreadable(f"a file holds no {holds}", path, why=f"it holds a {type(values).__name__}")
    return values


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file in UTF-8 or UTF-16; other bytes are replaced, a compressed file is refused."""
    with with_end(path).open("rb") as file:
        for mark in filter(file.peek(6).startswith, COMPRESSED):
            fix = "unpack it, and name the file that comes out"
            raise unreadable("a file is compressed", path, why=f"it begins as {COMPRESSED[mark]} does", fix=fix)
        wide = file.peek(2)[:2] in (BOM_UTF16_LE, BOM_UTF16_BE)
        yield from io.TextIOWrapper(file, "utf-16" if wide else "utf-8-sig", errors="replace", newline="\n")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSONL file, or in lists in its lines; ignores a half-written last line, refuses other lines."""
    numbered = enumerate(text_lines(path), start=1)
    for number, line in numbered:
        if not line.strip():
            continue
        try:
            value = json_of(line)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and next(numbered, None) is None:
                return
            fix = f"fix line {number}, or leave it out: sed {number}d {path.name} > rest.jsonl" if number > 1 else ""
            raise unreadable(f"line {number} is not JSON", path, why=shortened(error), fix=fix) from error
        for row in value if isinstance(value, list) else [value]:
            if not isinstance(row, dict):
                raise unreadable(f"line {number} is no JSON object", path, why=f"it is a {type(row).__name__}")
            yield row


def each_row(
    rows: Iterable[Any], path: Path, read: Callable[[Mapping[str, Any]], Read], *, what: str = DAMAGED, fix: str = ""
) -> Iterator[Read]:
    """What `read` makes of each row; a DataError for one that it cannot use, `what` has a place for its number."""
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"it is a {type(row).__name__}")
            yield read(row)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {shortened(error)}"
            raise unreadable(what.format(number), path, why=why, fix=fix) from error


def shortened(error: Exception) -> str:
    """The message of an error in one line of a length that can be read."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())[:200]


def refuse_names(names: Mapping[str, str] | None, path: Path, *, why: str) -> None:
    """Refuse names for a record whose metrics have klamp's names already, with a ConfigError."""
    if names:
        got = f"{', '.join(f'{ours}={theirs}' for ours, theirs in names.items())} for {path}"
        raise ConfigError("the record has no names to map", got=got, why=why, fix="leave --map out")
