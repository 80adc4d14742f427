"""JSONL with a step's metrics in each line: steps, names, evaluations, and the error where nothing is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from klamp.diagnostics.doctor import examine
from klamp.diagnostics.names import flat, is_verl_line
from klamp.errors import DataError
from klamp.records.logs import read_metrics


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


def logged_by_verl(kl: list[float | None]) -> list[dict[str, object]]:
    """Lines of verl's file logger, in its names: a validation before training, then steps with the next one."""
    before = {"val-core/gsm8k/acc/mean@8": 0.8, "val-aux/num_turns/mean": 2.0}
    steps = [
        {
            "step": step,
            "data": {
                "training/global_step": step,
                "actor/kl_loss": value,
                "critic/score/mean": 0.5,
                "response_length/clip_ratio": 0.0,
                "response_length/mean": 20.0,
                "actor/grad_norm": 1.0,
            },
        }
        for step, value in enumerate(kl, start=1)
    ]
    steps[-1]["data"] = {**steps[-1]["data"], "val-core/gsm8k/acc/mean@8": 0.4}  # pyright: ignore[reportGeneralTypeIssues]
    return [{"step": 0, "data": before}, *steps]


def test_verls_file_log(tmp_path: Path) -> None:
    kl: list[float | None] = [0.0, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5]
    history = read_metrics(lines(tmp_path, *logged_by_verl(kl)))
    assert history.source == "verl file log"
    assert [(row.step, row.metrics["kl/k3"]) for row in history.rows] == list(enumerate(kl, start=1))
    assert history.rows[0].metrics.keys() == {"kl/k3", "reward", "length/truncated", "length/mean", "train/grad_norm"}
    assert [(row.step, dict(row.metrics)) for row in history.evaluations] == [
        (0, {"gsm8k/acc/mean@8": 0.8}),
        (7, {"gsm8k/acc/mean@8": 0.4}),
    ]
    assert history.settings.k3_over_updates
    assert [finding.alarm.name for finding in examine(history).findings] == ["kl-spike", "retention"]


def test_a_null_of_verls_is_a_number_that_json_could_not_hold(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, *logged_by_verl([0.0, None])))
    assert math.isnan(history.rows[-1].metrics["kl/k3"])
    assert "huge-values" in [finding.alarm.name for finding in examine(history).findings]


def test_a_log_of_verls_with_a_validation_only_is_one(tmp_path: Path) -> None:
    history = read_metrics(lines(tmp_path, logged_by_verl([0.0])[0]))
    assert not history.rows
    assert [row.step for row in history.evaluations] == [0]


def test_a_line_of_verls_becomes_one_row() -> None:
    assert flat({"step": 3, "data": {"actor": {"kl_loss": 0.1}, "perf/x": 1}}) == {
        "actor/kl_loss": 0.1,
        "perf/x": 1,
        "step": 3,
    }
    other = {"step": 3, "data": "gsm8k", "kl": 0.1}
    assert not is_verl_line(other)
    assert flat(other) == other


def test_names_of_ones_own(tmp_path: Path) -> None:
    mine = lines(tmp_path, {"step": 1, "my/kl": 0.1, "kl": 7.0, "note": "x"}, {"step": 2, "my/kl": 0.2})
    assert [dict(row.metrics) for row in read_metrics(mine, {"kl/k3": "my/kl"}).rows] == [
        {"kl/k3": 0.1},
        {"kl/k3": 0.2},
    ]
    with pytest.raises(DataError, match="no row of the record has a number called 'note'") as caught:
        read_metrics(mine, {"kl/k3": "note"})
    assert caught.value.why == "it has kl, my/kl, step"
    verls = lines(tmp_path, *logged_by_verl([0.0, 0.1]))
    history = read_metrics(verls, {"kl/k1": "actor/kl_loss"})
    assert [row.metrics["kl/k1"] for row in history.rows] == [0.0, 0.1]
    assert "kl/k3" not in history.names
