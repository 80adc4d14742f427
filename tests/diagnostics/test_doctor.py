"""What the doctor finds in a history, when, and how far noise is from an alarm."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.diagnostics.histories import completion, history_of

from klamp.doctor import examine as examination
from klamp.doctor.alarms import ALARMS
from klamp.doctor.examine import LATE, AlarmWatch, examine
from klamp.doctor.history import EARLY, WRITTEN, Row, RunSettings
from klamp.doctor.readers.logs import read_text


def run_of_trouble():
    kl = [0.0, 0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.5, 0.5, 0.5, 0.5, 0.5]
    norms, row = [1.0, 1.0, 1.0, 2e3, 1.0, 3e3, *[1.0] * 6], completion(8, ref=(-1.0, -2.0, -3.0))
    return history_of(k3=kl, train__grad_norm=norms, settings=RunSettings(beta=0.1), written=[row])


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
    said, found = ({(x.alarm.name, x.first_step) for x in each} for each in (told, examine(history).findings))
    assert said == found
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
    watch, last = AlarmWatch(RunSettings()), EARLY + LATE + 29
    for step in range(1, last):
        watch.keep(rows=[Row(step=step, metrics={"reward": 0.5})], completions=[completion(step)])
    watch.keep(completions=[completion(last)])
    watch.step(last, {"reward": 0.5})
    steps = [row.step for row in watch.history.rows]
    assert len(steps) == EARLY + LATE and steps[0] == 1
    assert list(watch.history.completions) == [1, *range(last - WRITTEN + 1, last + 1)]


@pytest.mark.parametrize(
    ("curves", "beta", "blind"),
    [
        ({"reward": [0.5]}, None, True),
        ({"reward": [0.5]}, 0.04, True),
        ({"reward": [0.5]}, 0.0, False),
        ({"reward": [0.5], "beta": [0.0]}, 0.04, False),
        ({"k3": [0.0]}, None, False),
        ({"teacher__kl": [0.0] * 4, "teacher__coef": [0.1] * 4}, None, False),
        ({"kl__k1_sequence": [0.0]}, None, True),
        ({"policy__kl_old": [0.0], "sampler__k3": [0.0]}, None, True),
    ],
)
def test_a_kl_that_nobody_looked_at(curves: dict[str, list[float]], beta: float | None, blind: bool) -> None:
    assert bool(examine(history_of(settings=RunSettings(beta=beta), **curves)).blind) is blind


def test_the_last_values_of_a_metric_skip_steps_without_it_and_the_kl_is_the_least_noisy_one() -> None:
    history = history_of(reward=[1, 2, 3, 4, 5])
    history.rows[3] = Row(step=4, metrics={})
    assert history.last("reward", 3) == [2, 3, 5]
    assert history.last("reward", 2, before=1) == [2, 3]
    assert history.last("reward", 99) == [1, 2, 3, 5]
    assert history.last("nothing", 3) == []
    assert history.first("reward", 4) == [1, 2, 3]
    assert history_of(k1=[1.0]).kl_name() == "kl/k1"
    assert history_of(k1=[1.0], k3=[1.0]).kl_name() == "kl/k3"
    assert history_of(k1=[1.0], k3=[1.0], exact=[1.0]).kl_name() == "kl/exact"
    assert history_of(reward=[1.0]).kl_name() == ""


@pytest.mark.parametrize(
    ("curves", "beta", "penalized"),
    [
        ({"k3": [0.1]}, None, True),  # TRL logs a KL only where beta is not 0
        ({"reward": [0.1]}, None, False),
        ({"k3": [0.1]}, 0.0, False),
        ({"k3": [0.1]}, 0.1, True),
        ({"k3": [0.1], "beta": [0.0]}, 0.1, False),
        ({"reward": [0.1], "beta": [0.2]}, None, True),
    ],
)
def test_whether_a_kl_holds_the_policy(curves: dict, beta: float | None, penalized: bool) -> None:
    assert history_of(settings=RunSettings(beta=beta), **curves).penalized is penalized


def test_log_ratios_are_of_trained_tokens_that_have_both() -> None:
    row = completion(
        policy=(-1.0, -2.0, math.nan), ref=(-1.5, -1.0, -0.5), sampler=(-1.2, -2.0, -0.5), trained=(True, False, True)
    )
    assert row.log_ratios() == [(0, 0.5)]
    assert row.log_ratios("sampler") == [(0, pytest.approx(-0.2))]
    assert completion(ref=None).log_ratios() == []


def test_a_replay_shows_the_run_as_it_grew_with_the_completions_that_rules_look_at() -> None:
    history = history_of(reward=[0.1, 0.2, 0.3])
    history.evaluations = [Row(step=step, metrics={"a": 1.0}) for step in (0, 2, 3)]
    history.add_completions([completion(2), completion(2), completion(3)])
    seen = [(len(view.rows), len(view.evaluations), view.step, len(view.completions)) for view in history.replay()]
    assert seen == [(0, 1, 0, 0), (1, 1, 1, 0), (2, 1, 2, 1), (2, 2, 2, 1), (3, 2, 3, 2), (3, 3, 3, 2)]
    history = history_of(reward=[0.1] * 9)
    history.add_completions(map(completion, range(1, 10)))
    *_, last = history.replay()
    assert list(last.completions) == [1, 7, 8, 9]
    assert len(history.completions) == 9


WILD = [0.01, 0.09, 0.02, 0.08, 0.01, 0.06, 0.03, 0.12, 0.02, 0.05]
SOLVED = [0.5, 0.25, 0.75, 0.5, 1.0, 0.5, 0.75, 0.75, 0.5, 0.25]
"""Rewards of 4 completions a step."""
CUT, KEPT, LESS = [0.0, 0.25, 0.0, 0.25, 0.0], [0.25, 0.0, 0.0, 0.0, 0.25], [0.5, 0.25, 0.5, 0.25]
LOOPS = [0.2, 0.3, 0.1, 0.2, 0.3]
TAUGHT, EQUAL = {"teacher__coef": [1.0] * 60}, {"groups__saturated": [1.0] * 20}

THEIRS, NORMS = {"settings": RunSettings(other_kernels=True)}, [0.2, 0.3] * 20
HARDER = [0.8, 0.84] * 15 + [0.4, 0.44] * 5
LONGER = [100.0 + 10 * step for step in range(60)]
LEVEL, JUMP = [0.011, 0.012] * 15, [0.02, 0.03] * 10
SHORT = {"length": [8.0] * 10}
OTHER = {"length": [8.0], "settings": RunSettings(other_reference=True)}
FEW = {"length": [1.0] * 4, "settings": RunSettings(prompts=4)}
ONE = {"settings": RunSettings(prompts=1)}
CURVES: list[tuple[str, str, dict[str, Any]]] = [
    # by chance, and in truth
    ("kl-spike", "", {"k3": [*WILD, 0.9, 0.04]}),  # by one token
    ("kl-spike", "alarm", {"k3": [*WILD, 0.9, 0.8]}),
    ("detached-reference", "", {"k3": [*WILD, 0.05, 0.0004]}),  # of one token a completion
    ("detached-reference", "alarm", {"k3": [*WILD, 0.05, 0.0]}),
    ("reference-differs", "", {"k3": [0.04], **OTHER}),  # of 8 tokens
    ("reference-differs", "alarm", {"k3": [0.08], **OTHER}),
    ("negative-k1", "", {"k1": [0.1, -0.3, 0.2, 0.1], **FEW}),  # of 4 tokens
    ("negative-k1", "alarm", {"k1": [0.1, -4.0, 0.2, 0.1], **FEW}),
    ("k3-far-above-k1", "", {"k1": [0.2, -0.1, 0.15, -0.2, -0.03], "k3": [0.08] * 5}),  # k1 is 0 by chance
    ("k3-far-above-k1", "alarm", {"k1": [0.01, -0.01, 0.005, 0.01, -0.01], "k3": [0.8] * 5}),
    ("sampler-mismatch", "", {"sampler__k3": [0.001, 0.002, 0.03, 0.001, 0.002] * 2, **SHORT}),  # a bad token
    ("sampler-mismatch", "alarm", {"sampler__k3": [0.05, 0.02, 0.06, 0.03, 0.02] * 2, **SHORT}),
    ("truncated", "", {"length__truncated": [*CUT, *KEPT, 0.5, 0.25, 0.5, 0.25, 0.25]}),  # 7 of 20 completions
    ("truncated", "alarm", {"length__truncated": [*CUT, *KEPT, *[1.0] * 10]}),
    ("truncated", "", {"length__truncated": [*LESS, 0.0, *CUT, *KEPT, 0.5, 0.25, 0.25, 0.5, 0.0], **EQUAL}),
    ("truncated", "alarm", {"length__truncated": [0.75, 0.5, 1.0, 0.5, 0.75] * 4, **EQUAL}),
    ("repetition", "", {"length__repeated": [*LOOPS, 0.2, 0.9, 0.9, 0.2, 0.3]}),
    ("repetition", "alarm", {"length__repeated": [*LOOPS, 0.8, 0.9, 0.9, 0.8, 0.9]}),
    ("saturated", "", {"groups__saturated": [0.0] * 5 + [1.0] * 25, **ONE}),  # 20 groups of one a step
    ("saturated", "alarm", {"groups__saturated": [0.0] * 5 + [1.0] * 60, **ONE}),
    ("reward-collapse", "", {"reward": [*SOLVED, 1.0, 1.0, 0.75, 1.0, 0.75, *SOLVED, 0.25, 0.5, 0.25, 0.0, 0.25]}),
    ("reward-collapse", "alarm", {"reward": [*SOLVED, *SOLVED, *SOLVED, *[0.0] * 25]}),
    ("teacher-silent", "", {"teacher__unscored": [0.0, 0.25, 0.0, 0.3, 0.0] + [0.0] * 15}),  # two completions
    ("teacher-silent", "alarm", {"teacher__unscored": [0.25, 0.5, 0.25, 0.3, 0.25] * 4}),
    ("teacher-not-reached", "", {"teacher__kl": [0.3, 0.1, 0.9, 0.2, 0.1] * 11 + [0.1, 0.1, 1.4, 0.1, 0.2], **TAUGHT}),
    ("teacher-not-reached", "alarm", {"teacher__kl": [0.5, 0.4, 0.6, 0.5, 0.5] * 12, **TAUGHT}),
    # what a run is for, and how long it lasts
    ("truncated", "alarm", {"length": LONGER, "reward": [0.4, 0.5] * 30}),
    ("truncated", "", {"length": LONGER, "reward": [0.01 * step for step in range(60)]}),
    ("truncated", "", {"length": LONGER, "reward": [0.0] * 60}),
    ("teacher-inert", "alarm", {"teacher__kl": [2e-5, -3e-5] * 30, **THEIRS}),
    ("teacher-inert", "", {"teacher__kl": [0.3 * 0.8**step for step in range(60)], **THEIRS}),
    ("teacher-inert", "", {"teacher__kl": [2e-5, -3e-5] * 30, "first": 200, **THEIRS}),
    ("reward-collapse", "", {"reward": HARDER, "train__grad_norm": NORMS}),
    ("reward-collapse", "alarm", {"reward": HARDER, "train__grad_norm": [*NORMS[:29], 9.0, *NORMS[:10]]}),
    ("reward-collapse", "alarm", {"reward": HARDER}),
    ("sampler-mismatch", "alarm", {"sampler__abs": [*LEVEL, *[0.04] * 5]}),
    ("sampler-mismatch", "", {"sampler__abs": [*LEVEL, 0.04, 0.04, 0.01, 0.04, 0.04]}),
    ("kl-spike", "note", {"k3": [*JUMP, 0.6, *JUMP]}),
    ("kl-spike", "alarm", {"k3": [*JUMP, 0.6]}),
    ("kl-spike", "alarm", {"k3": [*JUMP, 5.0, *JUMP]}),
    ("kl-spike", "alarm", {"k3": [*JUMP, 0.6, *JUMP], "reward": [0.6, 0.7] * 10 + [0.1, 0.2] * 11}),
]
"""Alarm, its level (empty: it does not rise), the curves of a run."""


@pytest.mark.parametrize(("alarm", "level", "curves"), CURVES)
def test_a_curve_raises_an_alarm_a_note_or_nothing(
    alarm: str, level: str, curves: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "ALARMS", {alarm: ALARMS[alarm]})  # all of them take twenty times as long
    assert [finding.alarm.level for finding in examine(history_of(**curves)).findings] == [level] * bool(level)


def test_a_step_before_a_printed_row_and_a_share_that_stopped(tmp_path: Path) -> None:
    row = "Global step {0}: {{'scores': 4.0, 'val/stop_rate': 0.75}}\nTest, global_step {0}: {{'eval_pass1': 0.2}}\n"
    (tmp_path / "log.txt").write_text(row.format(7) + row.format(8), encoding="utf-8")
    rows = read_text(tmp_path / "log.txt").rows
    assert [(x.step, x.metrics) for x in rows] == [(step, {"reward": 4.0, "length/truncated": 0.25}) for step in (7, 8)]
