"""JSONL with a step's metrics in each line: steps, names, evaluations, and the error where nothing is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from klamp.errors import DataError
from klamp.records.metrics_lines import read_metrics


def lines(folder: Path, *rows: object) -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_a_line_is_a_step_under_klamps_names(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, {"step": 3, "kl": 0.1, "reward": 1, "unknown": 7}, {"step": 5, "kl": 0.2}))
    assert [(row.step, dict(row.metrics)) for row in history.rows] == [
        (3, {"kl/k3": 0.1, "reward": 1.0}),
        (5, {"kl/k3": 0.2}),
    ]
    assert history.source == "JSONL metrics"


def test_lines_without_a_step_are_counted(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, {"kl": 0.1}, {"nothing": 1}, {"kl": 0.2}))
    assert [row.step for row in history.rows] == [1, 3], "a line without a known metric counts too"


def test_evaluations_are_kept_apart(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, {"step": 1, "kl": 0.1}, {"step": 2, "eval_reward": 0.5, "kl": 0.2}))
    assert [(row.step, dict(row.metrics)) for row in history.evaluations] == [(2, {"reward": 0.5})]
    assert all("eval_reward" not in row.metrics for row in history.rows)


@pytest.mark.parametrize(("rows", "why"), [((), "the file is empty"), (({"a": 1, "b": 2},), "the first line has a, b")])
def test_a_file_without_a_known_metric_is_refused(tmp_path: Path, rows: tuple, why: str) -> None:
    with pytest.raises(DataError, match="no metric and no token log-probabilities") as caught:
        read_metrics(lines(tmp_path, *rows))
    assert caught.value.why == why
    assert "old_log_probs" in caught.value.fix
