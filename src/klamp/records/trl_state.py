"""Reads the trainer_state.json of TRL (or any transformers Trainer): a list of logged rows, each with its step."""

from __future__ import annotations

from pathlib import Path

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import evaluations, settings_of, translate
from klamp.records.files import json_object, unreadable

STATE = "trainer_state.json"


def find_state(path: Path) -> Path | None:
    """Find the trainer_state.json of a folder or of its newest checkpoint."""
    if (path / STATE).is_file():
        return path / STATE
    found = sorted(path.glob(f"checkpoint-*/{STATE}"), key=lambda file: _number(file.parent.name))
    return found[-1] if found else None


def _number(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


def read_trl_state(path: Path) -> History:
    """Read the history in a trainer_state.json.

    Raises:
        DataError: it is none.
    """
    rows = json_object(path).get("log_history")
    if not isinstance(rows, list):
        raise unreadable("a trainer state has no log_history", path, why="without logged rows there is no history")
    logged = {name for row in rows for name in row}
    history = History(source="TRL trainer state", settings=settings_of({}, logged))
    for row in rows:
        scores, metrics, step = evaluations(row), translate(row), int(row.get("step", 0))
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if "train_runtime" not in row and metrics:  # the last row sums up the run
            history.rows.append(Row(step=step, metrics=metrics))
    return history
