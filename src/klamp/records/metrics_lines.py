"""Reads JSONL files with the metrics of one step per line, as verl's file logger and many others write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import evaluations, number_names, settings_of, step_of, translate
from klamp.diagnostics.verl_log import flat, is_verl_line
from klamp.records.files import json_lines, unreadable
from klamp.records.mapped import check_logged


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
