"""A whole run: findings in order, when they rose, what could not be checked."""

import pytest
from tests.diagnostics.histories import completion, history_of

from klamp.doctor.examine import LATE, AlarmWatch, examine
from klamp.doctor.history import EARLY, WRITTEN, Row, RunSettings


def run_of_trouble():
    kl = [0.0, 0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5, 0.5, 0.5, 0.5, 0.5]
    norms = [1.0, 1.0, 1.0, 2e3, 1.0, 3e3, *[1.0] * 6]
    history = history_of(k3=kl, train__grad_norm=norms, settings=RunSettings(beta=0.1))
    history.add_completions([completion(8, ref=(-1.0, -2.0, -3.0))])
    return history


def test_findings_come_in_order_with_when_they_rose_and_notes_fail_only_where_they_are_named() -> None:
    diagnosis = examine(run_of_trouble())
    assert [(f.alarm.name, f.first_step, f.last_step, f.steps) for f in diagnosis.findings] == [
        ("huge-values", 4, 6, 2),
        ("kl-spike", 8, 9, 2),
        ("kl-high", 10, 12, 3),
    ]
    spike = diagnosis.findings[1]
    assert "0.5" in spike.evidence.text and "0.02" in spike.evidence.text
    assert [token.position for token in spike.evidence.tokens] == [2]
    assert diagnosis.failed() == ["huge-values", "kl-spike"]
    assert diagnosis.failed(["kl-high"]) == ["kl-high"]
    assert diagnosis.failed(["retention"]) == []
    finding = spike.record
    assert finding["name"] == "kl-spike" and finding["first_step"] == 8 and finding["level"] == "alarm"
    assert finding["tokens"][0]["token"] == "<eos>"


def test_what_the_record_lacks_is_said() -> None:
    history = history_of(k3=[0.0, 0.1])
    unchecked = examine(history).unchecked
    assert unchecked["k3-far-above-k1"] == "kl/k1"
    assert unchecked["mask-on-prompt"] == "completions, sampler_logprobs"
    assert unchecked["dr-grpo-with-kl"] == "settings.loss_type, settings.verifier"
    assert unchecked["retention"] == "evaluations"
    assert "kl-spike" not in unchecked and "step-zero-kl" not in unchecked
    history.evaluations = [Row(step=step, metrics={"a": 1.0}) for step in (0, 2)]
    assert "retention" not in examine(history).unchecked


def test_an_alarm_is_told_once_and_at_the_step_where_the_doctor_finds_it() -> None:
    curves = {"k3": [0.01] * 8 + [2.0] * 6, "length": [10.0] * 14, "reward": [0.5] * 14}
    history, watch = history_of(**curves), AlarmWatch(RunSettings())
    told = [finding for row in history.rows for finding in watch.step(row.step, row.metrics)]
    found = examine(history).findings
    assert {(each.alarm.name, each.first_step) for each in told} == {
        (each.alarm.name, each.first_step) for each in found
    }
    assert len(told) == len({each.alarm.name for each in told}) > 1


def test_what_was_told_before_is_not_told_again_and_stops_all_the_same() -> None:
    watch = AlarmWatch(RunSettings(), reported=("kl-spike",), stop_on=("kl-spike",))
    assert watch.step(4, {"kl/k3": 0.01}) == [] and watch.stopped_by is None
    assert watch.step(5, {"kl/k3": 5.0}) == []
    assert watch.stopped_by is not None and watch.stopped_by.alarm.name == "kl-spike"


def test_evaluations_are_looked_at() -> None:
    watch = AlarmWatch(RunSettings(rl_skill="a", eval_size=1000))
    assert watch.evaluation(0, {"a": 0.1, "b": 0.9}) == []
    assert [finding.alarm.name for finding in watch.evaluation(5, {"a": 0.9, "b": 0.5})] == ["retention"]


def test_a_long_run_is_not_kept_whole() -> None:
    watch = AlarmWatch(RunSettings())
    for step in range(1, EARLY + LATE + 30):
        watch.keep(completions=[completion(step)])
        watch.step(step, {"reward": 0.5})
    steps = [row.step for row in watch.history.rows]
    assert len(steps) == EARLY + LATE and steps[0] == 1
    last = EARLY + LATE + 29
    assert list(watch.history.completions) == [1, *range(last - WRITTEN + 1, last + 1)]


@pytest.mark.parametrize(
    ("curves", "beta", "blind"),
    [
        ({"reward": [0.5]}, None, True),
        ({"reward": [0.5]}, 0.04, True),
        ({"reward": [0.5]}, 0.0, False),
        ({"reward": [0.5], "beta": [0.0]}, 0.04, False),
        ({"k3": [0.0]}, None, False),
        ({"kl__k1_sequence": [0.0]}, None, True),
        ({"policy__kl_old": [0.0], "sampler__k3": [0.0]}, None, True),
    ],
)
def test_a_kl_that_nobody_looked_at(curves: dict[str, list[float]], beta: float | None, blind: bool) -> None:
    assert bool(examine(history_of(settings=RunSettings(beta=beta), **curves)).blind) is blind
