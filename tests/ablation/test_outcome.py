"""The file that says what a run came to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from klamp.ablation.outcome import OUTCOME, Outcome, read_outcome, write_outcome
from klamp.errors import DataError

WHOLE = Outcome(
    run="a_seed-1",
    arm="a",
    seed=1,
    values={"beta": 0.5, "ref_model": None},
    rl_skill="addition",
    before={"addition": 0.25},
    after={"addition": 0.75},
    numbers={"kl/reverse": 0.125},
    by_step={"step": [1, 2], "reward": [0.5, 0.75]},
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
    [{"seed": "0"}, {"numbers": [1.0]}, {"before": {"addition": "good"}}, {"by_step": {"step": 3}}, {"arm": None}],
)
def test_a_field_of_another_type_is_refused_by_name(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps({"run": "a", "arm": "a", "seed": 0, **change}))
    with pytest.raises(DataError, match=f"TypeError: {next(iter(change))} is "):
        read_outcome(tmp_path)
