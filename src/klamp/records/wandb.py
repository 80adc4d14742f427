"""Reads offline runs of W&B: records in wandb's own protocol, in files with LevelDB's framing.

The messages are read with wandb. The frame is read here: current versions of wandb have no
reader for it in Python.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import OURS, evaluations, number_names, settings_of, step_of, translate
from klamp.errors import missing_library
from klamp.records.files import check_logged, unreadable

MAGIC, BLOCK = b":W&B", 32768
FILE_HEADER, FRAME = 7, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def find_offline_run(path: Path) -> list[Path]:
    """Find the run file in a W&B folder: in the run's own folder, or in `wandb/offline-run-...`."""
    found = {file.resolve() for pattern in ("*.wandb", "*/*.wandb", "wandb/*/*.wandb") for file in path.glob(pattern)}
    return sorted(found)


def read_wandb(path: Path, names: Mapping[str, str] | None = None) -> History:
    """Read the history in the file of an offline run.

    Args:
        path: the file.
        names: klamp's name of a metric -> that in the run, before the names that klamp knows.

    Raises:
        DataError: it is none, nothing was logged, or no row has one of `names`.
        MissingLibrary: wandb is not installed.
    """
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise missing_library("wandb", by=f"the record {path}") from error
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for data in frames(path):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            update = record.run.config.update if kind == "run" else record.config.update
            config |= {item.key: _value(item.value_json) for item in update if item.key}
        elif kind == "history":
            rows.append(
                {"/".join(item.nested_key) or item.key: _value(item.value_json) for item in record.history.item}
            )
    if not rows:
        raise unreadable("nothing was logged in the W&B run", path, why="it has no history")
    logged = {name for row in rows for name in row}
    check_logged(names, number_names(rows), path)
    history = History(source="W&B offline run", settings=settings_of(config, logged, names), config=config)
    for number, row in enumerate(rows, start=1):
        step = step_of(row)
        scores, metrics = evaluations(row, every=OURS in logged), translate(row, names)
        _add(history, number if step is None else step, scores, metrics)
    return history


def _add(history: History, step: int, scores: dict[str, float], metrics: dict[str, float]) -> None:
    """Join a row to the step that it belongs to: a step may be logged in several rows."""
    if scores:
        history.evaluations.append(Row(step=step, metrics=scores))
    if metrics and history.rows and history.rows[-1].step == step:
        history.rows[-1] = Row(step=step, metrics={**history.rows[-1].metrics, **metrics})
    elif metrics:
        history.rows.append(Row(step=step, metrics=metrics))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def frames(path: Path) -> Iterator[bytes]:
    """The records of a file, put together from its blocks; a half-written one, left by a killed run, is ignored."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise unreadable("a file is no W&B run", path, why=f"it does not begin with {MAGIC.decode()}")
    position, parts = FILE_HEADER, bytearray()
    while position + FRAME.size <= len(data):
        left = BLOCK - position % BLOCK
        _, length, kind = FRAME.unpack_from(data, position)
        if left < FRAME.size or not kind:  # the rest of a block, filled with zeros
            position += left
            continue
        position += FRAME.size
        if position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield bytes(parts)
            parts.clear()
