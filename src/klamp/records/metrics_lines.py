"""Reads JSONL files with the metrics of one step per line, as many trainers write them."""

from __future__ import annotations

from pathlib import Path

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import evaluations, settings_of, step_of, translate
from klamp.records.files import json_lines, unreadable


def read_metrics(path: Path) -> History:
    """Read the history in a JSONL file of metrics.

    Raises:
        DataError: no line has a metric that klamp knows.
    """
    lines = json_lines(path)
    history = History(source="JSONL metrics", settings=settings_of({}, {name for line in lines for name in line}))
    for number, line in enumerate(lines, start=1):
        step, scores, metrics = step_of(line), evaluations(line), translate(line)
        step = number if step is None else step
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if metrics:
            history.rows.append(Row(step=step, metrics=metrics))
    if not history.rows:
        raise unreadable(
            "no metric and no token log-probabilities were found",
            path,
            why=f"the first line has {', '.join(list(lines[0])[:12])}" if lines else "the file is empty",
            fix="metrics: a line per step with names as TRL, verl or klamp write them (kl, reward, ...); completions: "
            "old_log_probs and ref_log_prob (or policy_logprobs and ref_logprobs), one number per token",
        )
    return history
