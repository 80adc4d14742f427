"""The file that says what a run came to; what each column reads from it, and when it has nothing to read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.ablation.outcomes import BEFORE, outcome

from klamp.ablation.outcome import (
    COLUMNS,
    OUTCOME,
    Outcome,
    read_outcome,
    retained,
    retained_skills,
    write_outcome,
)
from klamp.errors import DataError

BY_NAME = {column.name: column for column in COLUMNS}

WHOLE = Outcome(
    run="a_seed-1",
    arm="a",
    seed=1,
    values={"beta": 0.5, "ref_model": None},
    rl_skill="addition",
    before={"addition": 0.25},
    after={"addition": 0.75},
    numbers={"kl/reverse": 0.125},
)


def test_an_outcome_survives_its_file(tmp_path) -> None:
    write_outcome(tmp_path, WHOLE)
    assert read_outcome(tmp_path) == WHOLE
    failed = Outcome(run="a_seed-1", arm="a", seed=1, state="failed", error="it broke\n  why: so")
    write_outcome(tmp_path, failed)
    assert read_outcome(tmp_path) == failed
    assert [file.name for file in tmp_path.iterdir()] == [OUTCOME], "nothing half written is left"


def test_no_file_is_no_outcome(tmp_path) -> None:
    assert read_outcome(tmp_path) is None
    assert read_outcome(tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"run": "a"}', '{"runn": "a"}'])
def test_a_damaged_file_is_named(tmp_path, text) -> None:
    (tmp_path / OUTCOME).write_text(text)
    with pytest.raises(DataError) as caught:
        read_outcome(tmp_path)
    error = caught.value
    assert str(tmp_path / OUTCOME) in str(error.got) and error.why and "delete that file" in error.fix


@pytest.mark.parametrize(
    "change",
    [{"seed": "0"}, {"numbers": [1.0]}, {"before": {"addition": "good"}}, {"arm": None}],
)
def test_a_field_of_another_type_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps({"run": "a", "arm": "a", "seed": 0, **change}))
    with pytest.raises(DataError, match=f"TypeError: {next(iter(change))} is "):
        read_outcome(tmp_path)


def test_the_trained_skill() -> None:
    assert BY_NAME["rl/after"].value(outcome(after={"addition": 0.75})) == 0.75
    assert BY_NAME["rl/after"].value(outcome(after={})) is None


def test_retained_skills_were_measured_twice_and_not_trained() -> None:
    run = outcome(before={**BEFORE, "only before": 1.0}, after={"addition": 0.9, "reversal": 0.5, "only after": 1.0})
    assert retained_skills(run) == ("reversal",)
    assert (retained(run, run.before), retained(run, run.after)) == (0.99, 0.5)
    assert BY_NAME["retained/after"].value(run) == 0.5
    alone = outcome(before={"addition": 0.1}, after={"addition": 0.2})
    assert retained_skills(alone) == () and retained(alone, alone.after) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_none(bad: float) -> None:
    assert BY_NAME["kl/reverse"].value(outcome(numbers={"kl/reverse": bad})) is None


def test_a_failed_run_has_no_numbers_and_a_run_may_lack_some() -> None:
    assert all(column.value(outcome(state="failed")) is None for column in COLUMNS)
    run = outcome(numbers={"length": 4.0})
    assert BY_NAME["length"].value(run) == 4.0
    assert BY_NAME["kl/reverse"].value(run) is None


def test_every_column_has_its_own_name() -> None:
    assert len(BY_NAME) == len(COLUMNS)
