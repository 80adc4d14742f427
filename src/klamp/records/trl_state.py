"""Reads the trainer_state.json of TRL (or any transformers Trainer): a list of logged rows, each with its step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import evaluations, number_names, settings_of, translate
from klamp.records.files import each_row, json_object, unreadable
from klamp.records.mapped import check_logged

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


def read_trl_state(path: Path, names: Mapping[str, str] | None = None) -> History:
    """Read the history in a trainer_state.json.

    Args:
        path: the file.
        names: klamp's name of a metric -> that in the file, before the names that klamp knows.

    Raises:
        DataError: it is none, or no row has one of `names`.
    """
    logs = json_object(path).get("log_history")
    if not isinstance(logs, list):
        raise unreadable("a trainer state has no log_history", path, why="without logged rows there is no history")
    rows = list(each_row(logs, path, _with_step, what="row {} of log_history is damaged"))
    logged = {name for row in rows for name in row}
    check_logged(names, number_names(row for row in rows if not _sums_up(row)), path)
    history = History(source="TRL trainer state", settings=settings_of({}, logged, names))
    for row in rows:
        scores, metrics, step = evaluations(row), translate(row, names), row["step"]
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if metrics and not _sums_up(row):
            history.rows.append(Row(step=step, metrics=metrics))
    return history


def _with_step(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "step": int(row.get("step", 0))}


def _sums_up(row: Mapping[str, object]) -> bool:
    """Whether a row is the last one, which sums up the run."""
    return "train_runtime" in row
