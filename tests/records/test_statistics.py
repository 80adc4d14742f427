"""The metrics of completions as a record has them."""

import json
import math
from dataclasses import replace

import pytest
from tests.diagnostics.histories import completion

from klamp.doctor.examine import examine
from klamp.doctor.readers import read_record
from klamp.doctor.readers.rollouts import completion_metrics, row_of


def test_metrics_are_over_trained_tokens_and_what_is_not_there_is_no_metric() -> None:
    rows = [
        completion(ref=(-1.5, -2.0, -0.5), sampler=(-1.1, -2.0, -0.5), reward=1.0, ended=True),
        completion(ref=(-1.0, -1.0, -9.0), trained=(True, True, False), reward=0.0, ended=False),
    ]
    found = completion_metrics(rows)
    deltas = [0.5, 0.0, 0.0, 0.0, -1.0]
    assert found["kl/k1"] == pytest.approx(sum(deltas) / 5)
    assert found["kl/k3"] == pytest.approx(sum(math.expm1(-d) + d for d in deltas) / 5)
    assert found["sampler/k1"] == pytest.approx(-0.1 / 3)
    assert found["sampler/k3"] == pytest.approx((math.expm1(0.1) - 0.1) / 3)
    assert (found["reward"], found["length/truncated"], found["length/mean"]) == (0.5, 0.5, 3)
    assert completion_metrics([completion(ref=None)]) == {"length/mean": 3, "length/repeated": 0}


@pytest.mark.parametrize(
    ("teacher", "name"),
    [
        ([-1.3] * 3, "repeated"),
        ([0.0] * 3, "repeated"),
        ([math.nan] * 3, "unscored"),
        (None, "unscored"),
        ([-1.1, -2.2, -0.4], ""),
    ],
    ids=["constant", "zero", "null", "no column", "sound"],
)
def test_a_teacher_that_falls_silent_in_a_file_of_completions(tmp_path, teacher, name) -> None:
    sound = {"policy_logprobs": [-1.0, -2.0, -0.5], "teacher_logprobs": [-1.1, -2.2, -0.4]}
    last = sound | {"teacher_logprobs": teacher} if teacher else {"policy_logprobs": [-1.0, -2.0, -0.5]}
    rows = [sound | {"step": 1}, sound | {"step": 2}, last | {"step": 3}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)).replace("NaN", "null"))
    diagnosis = examine(read_record(tmp_path / "rows.jsonl"))
    assert diagnosis.history.rows[0].metrics["teacher/k1"] == pytest.approx((0.1 + 0.2 - 0.1) / 3)
    assert "teacher-silent" in diagnosis.checked and "teacher-inert" in {*diagnosis.checked, *diagnosis.unchecked}
    risen = {x.alarm.name: (x.first_step, x.evidence.text) for x in diagnosis.findings}
    assert ("teacher-silent" in risen) == bool(name)
    assert not name or (risen["teacher-silent"][0] == 3 and f"teacher/{name}" in risen["teacher-silent"][1])


def test_groups_repetition_and_the_prompts_of_a_step() -> None:
    said = completion(tokens=tuple("ababab"), policy=(-1.0,) * 6, ref=None, reward=1.0, group="p")
    rows = [
        said,
        completion(reward=0.0, group="p"),
        completion(reward=0.5, group="q"),
        completion(reward=0.5, group="q"),
    ]
    found = completion_metrics(rows)
    assert found["length/repeated"] == pytest.approx(3 / 15), "ab, ba, ab, ba, ab: three were there before"
    assert found["reward_std"] == pytest.approx(math.sqrt(0.5) / 2) and found["groups/saturated"] == 0.5
    assert found["length/reward_correlation"] == pytest.approx(1)
    assert "reward_std" not in completion_metrics(rows[:3]), "a group is not whole"
    assert "length/repeated" not in completion_metrics([replace(said, tokens=("?",) * 6)]), "tokens without a name"

    twice = [completion(2, reward=0.25, group="a"), completion(2, reward=0.25, group="a")]
    row = row_of(2, [*twice, completion(2, reward=0.25, group="b")])
    assert (row.step, row.metrics["reward"], row.prompts) == (2, 0.25, 2)
