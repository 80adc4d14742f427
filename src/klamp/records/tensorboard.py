"""Reads TensorBoard's event files, with tensorboard's own reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import OURS, evaluations, settings_of, translate
from klamp.errors import missing_library
from klamp.records.files import check_logged, unreadable

EVENTS = "events.out.tfevents*"


def event_folders(path: Path) -> list[Path]:
    """All folders below a path that hold event files."""
    return sorted({file.parent for file in path.rglob(EVENTS)})


def read_tensorboard(path: Path, names: Mapping[str, str] | None = None) -> History:
    """Read the history in a folder of event files, or in a single one.

    Args:
        path: the folder or file.
        names: klamp's name of a metric -> the tag of its scalars, before the names that klamp knows.

    Raises:
        DataError: several runs below the folder, no scalars in it, or none with one of `names`.
        MissingLibrary: tensorboard is not installed.
    """
    folders = [path] if path.is_file() else _with_scalars(path)
    if len(folders) > 1:
        raise unreadable(
            "several TensorBoard runs lie below one folder",
            path,
            why=", ".join(str(folder.relative_to(path)) for folder in folders),
            fix="name one of them",
        )
    scalars, config = _read(folders[0] if folders else path)
    if not scalars:
        raise unreadable("there are no scalars in the event files", path, why="nothing was logged as a scalar")
    logged = {name for row in scalars.values() for name in row}
    check_logged(names, logged, path)
    history = History(source="TensorBoard", settings=settings_of(config, logged, names), config=config)
    for step in sorted(scalars):
        scores, metrics = evaluations(scalars[step], every=OURS in logged), translate(scalars[step], names)
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if metrics:
            history.rows.append(Row(step=step, metrics=metrics))
    return history


def _with_scalars(path: Path) -> list[Path]:
    """The folders that hold scalars; accelerate and transformers write hyperparameters into another one beside them."""
    folders = event_folders(path)
    return folders if len(folders) < 2 else [folder for folder in folders if _read(folder)[0]]


def _read(path: Path) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
    """Read the metrics (step -> name -> value), and the arguments if transformers wrote them as text."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise missing_library("tensorboard", by=f"the record {path}") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            rows.setdefault(event.step, {})[name] = float(event.value)
    config: dict[str, Any] = {}
    for name in events.Tags()["tensors"]:
        if name.startswith("args"):
            text = b"".join(events.Tensors(name)[-1].tensor_proto.string_val).decode("utf-8", "replace")
            config |= _json(text)
    return rows, config


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
