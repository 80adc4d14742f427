"""Reads what trainers log as text: JSONL with the metrics of one step per line (verl's file logger and many others),
and the trainer_state.json of TRL or any transformers Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import evaluations, flat, is_verl_line, number_names, settings_of, step_of, translate
from klamp.records.files import check_logged, each_row, json_lines, json_object, unreadable


def read_metrics(path: Path, names: Mapping[str, str] | None = None) -> History:
    """Read the history in a JSONL file of metrics.

    Args:
        path: the file.
        names: klamp's name of a metric -> that in the file, before the names that klamp knows.

    Raises:
        DataError: no line has a metric that klamp knows, or none has one of `names`.
    """
    verls, history = False, History(source="JSONL metrics")
    first: dict[str, Any] = {}
    logged: set[str] = set()
    seen: set[str] = set()
    for number, row in enumerate(json_lines(path), start=1):
        if number == 1 and is_verl_line(row):
            verls, history.source = True, "verl file log"
        line = flat(row) if verls else row
        first = first or line
        logged |= number_names([line])
        seen |= line.keys()
        step, scores, metrics = step_of(line), evaluations(line), translate(line, names)
        step = number if step is None else step
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if metrics:
            history.rows.append(Row(step=step, metrics=metrics))
    check_logged(names, logged, path)
    history.settings = settings_of({}, seen, names)
    if not (history.rows or (verls and history.evaluations)):
        raise unreadable(
            "no metric and no token log-probabilities were found",
            path,
            why=f"the first line has {', '.join(list(first)[:12])}" if first else "the file is empty",
            fix="metrics: a line per step with names as TRL, verl or klamp write them (kl, reward, ...), or --map with "
            "your own; completions: old_log_probs and ref_log_prob (or policy_logprobs and ref_logprobs), one number "
            "per token",
        )
    return history


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
