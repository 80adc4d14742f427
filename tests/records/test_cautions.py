"""What the doctor says of a record that it could not read whole: each beside a record for which it is false."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from klamp.diagnostics.metrics import LOGS
from klamp.records.logs import read_metrics

Rows = list[dict[str, Any]]
STEPS = range(1, 4)
NAN = float("nan")

CAUTIONS: list[tuple[str, Rows, Rows]] = [
    (
        "kl is NaN in every row while training went on: nobody measured it",
        [{"step": i, "kl": NAN, "grad_norm": 0.3} for i in STEPS],  # which logs no loss
        [{"step": i, "kl": 0.1 if i == 2 else NAN, "grad_norm": 0.3} for i in STEPS],
    ),
    (
        "kl is NaN in every row",
        [{"step": i, "kl": NAN, "loss": 0.3} for i in STEPS],
        [{"step": i, "kl": NAN, "loss": NAN} for i in STEPS],  # it may have been measured
    ),
    (
        "kl is no number in 1 of 3 rows, first at step 2: ['0.1', '0.2']",
        [{"step": i, "kl": ["0.1", "0.2"] if i == 2 else 0.1} for i in STEPS],
        [{"step": i, "kl": "0.1" if i == 2 else 0.1} for i in STEPS],
    ),
    (
        "no column says the step: rows are counted, and the first need not be the first step",
        [{"kl": 0.1}, {"kl": 0.2}, {"kl": 0.1}],
        [{"step": i, "kl": 0.1} for i in STEPS],
    ),
]


def cautions(folder: Path, rows: Rows) -> list[str]:
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_metrics(file).cautions


@pytest.mark.parametrize(("text", "true", "false"), CAUTIONS, ids=[text[:40] for text, _, _ in CAUTIONS])
def test_a_caution_is_said_of_what_could_not_be_read_alone(tmp_path: Path, text: str, true: Rows, false: Rows) -> None:
    assert any(each.startswith(text) for each in cautions(tmp_path, true))
    assert not any(each.startswith(text) for each in cautions(tmp_path, false))


@pytest.mark.parametrize(("log", "name"), [(log, name) for log in LOGS.values() for name in log.other_kl])
def test_a_kl_that_is_not_read_is_said_to_be_what_its_trainer_says(tmp_path: Path, log: Any, name: str) -> None:
    marks = dict.fromkeys(log.marks[:1], 0.1)
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"step": i, name: 0.1, "loss": 0.1, **marks}) + "\n" for i in STEPS))
    assert read_metrics(file).unread == {name: log.other_kl[name]}
    assert name not in read_metrics(file, {"kl/k3": name}).unread, "--map says what it is"
