"""What the doctor finds in a recorded run is what was told while it went on. `python -m tests.recorded` trains it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.recorded.plants import RECORDED, RUNS
from tests.recorded.record import FOLDER, lines, said
from tests.training.conftest import scores_of

from klamp.cli import main
from klamp.doctor.alarms import ALARMS
from klamp.doctor.alarms_run import TRUNCATED
from klamp.doctor.examine import AlarmFinding, Diagnosis, examine
from klamp.doctor.readers import read_record
from klamp.lab.folders import read_config
from klamp.lab.observers import AlarmObserver, Observer, RunInfo

WITH_TOKENS: dict[str, dict[str, int]] = {
    "adapter-not-zero": {"step-zero-kl": 1},
    "adapter-not-synced": {"sampler-mismatch": 3, "k3-far-above-k1": 5},
    "exploded-not-synced": {"k3-far-above-k1": 3, "kl-spike": 3, "sampler-mismatch": 3},
    "one-wrong-update": {"kl-spike": 9},
    "wrong-reference": {"reference-differs": 1},
}
"""Record -> the alarms that show five tokens, with the step that those are of."""

IN_NO_RUN = {
    "mask-on-prompt": "klamp's loop gives completions without their prompts; tests/diagnostics/test_alarms_tokens.py",
    "negative-beta": "klamp refuses it; tests/diagnostics/test_alarms_kl.py",
    "kl-not-in-loss": "klamp adds its KL to the loss; tests/records/test_foreign.py",
    "entropy-collapse": "the recorded runs without entropy earn all there is; tests/records/test_foreign.py",
    "target-missed": "no recorded run with a target has 60 steps; tests/diagnostics/test_alarms_kl.py",
    "not-trained": "no planted run stands still for a reason of its own; tests/diagnostics/test_alarms_run.py",
} | {
    name: "no recorded run has a teacher; tests/diagnostics/test_alarms_teacher.py"
    for name in ALARMS
    if "teacher" in name
}
"""Alarm that no record shows -> why."""
GOING_ON = ("adapter-not-zero", "dr-grpo-with-a-rule", "lost-end-token", "lost-skill", "one-wrong-update")
GOING_ON += ("large-advantages", "little-learning", "low-target", "wrong-reference", "short-adapter")
"""Records with evaluations, completions and settings that rules read, and a sound one."""


@cache
def diagnosis(name: str) -> Diagnosis:
    return examine(read_record(FOLDER / name))


def told(name: str) -> list[dict[str, Any]]:
    """What was told while the run went on: alarm, step, level."""
    return lines(FOLDER / name / "alarms.jsonl")


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_found_is_what_the_run_told_and_what_any_seed_must_show(name: str) -> None:
    assert sorted(said(diagnosis(name))) == sorted((row["name"], row["step"], row["level"]) for row in told(name))
    assert RUNS[name].misses(diagnosis(name)) == []


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_the_tokens_to_blame(name: str) -> None:
    shown = {each.alarm.name: each.evidence.tokens for each in diagnosis(name).findings if each.evidence.tokens}
    assert {alarm: {token.step for token in tokens} for alarm, tokens in shown.items()} == {
        alarm: {step} for alarm, step in WITH_TOKENS[name].items()
    }
    assert all(len(tokens) == 5 for tokens in shown.values())


def test_every_alarm_is_in_some_recorded_run() -> None:
    found = {row["name"] for name in RECORDED for row in told(name)}
    assert found.isdisjoint(IN_NO_RUN)
    assert found | IN_NO_RUN.keys() == set(ALARMS)


@pytest.mark.parametrize("name", ["one-wrong-update", "little-learning", "sound"])
def test_the_command_fails_where_an_alarm_rose(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    alarmed = [row["name"] for row in told(name) if row["level"] == "alarm"]
    assert main(["doctor", str(FOLDER / name)]) == int(bool(alarmed))
    out = capsys.readouterr().out
    assert all(alarm in out for alarm in alarmed)
    assert bool(re.search(r"\nno alarm(, \d+ notes?)?; ", out)) == (not alarmed)


@pytest.mark.parametrize("name", GOING_ON)
def test_a_run_that_goes_on_is_told_what_is_found_afterwards(name: str, tmp_path: Path) -> None:
    rose: list[AlarmFinding] = []

    class Told(Observer):
        def on_alarm(self, finding: AlarmFinding) -> None:
            rose.append(finding)

    whole = diagnosis(name)
    observer = AlarmObserver(lambda call: call(Told()), rl_skill=whole.history.settings.rl_skill or "")
    observer.on_start(info(FOLDER / name, tmp_path))
    for row in lines(FOLDER / name / "metrics.jsonl"):
        scores, step = scores_of(row), row["step"]
        if scores:
            observer.on_evaluation(step, scores)
            continue
        if written := [each for each in lines(FOLDER / name / "completions.jsonl") if each["step"] == step]:
            observer.on_completions(step, written)
        observer.on_step(step, {metric: value for metric, value in row.items() if metric != "step"})
    assert sorted(said(replace(whole, findings=rose))) == sorted(said(whole)), "each one once"


def info(record: Path, folder: Path) -> RunInfo:
    """The recorded run before its first step, in a folder where nothing lies yet."""
    known = {"parameters": 1, "trainable_parameters": 1, "device": ""}
    return RunInfo(config=read_config(record)[1], output_dir=folder, start_step=0, **known)


def test_what_is_cut_by_design_is_cut_in_every_step() -> None:
    rows = diagnosis("cut-by-design-gpt2").history.rows
    assert min(row.metrics["length/truncated"] for row in rows) > TRUNCATED.value


def test_all_records_are_here_and_small_and_name_no_place() -> None:
    assert {file.parent.name for file in FOLDER.glob("*/metrics.jsonl")} == set(RECORDED)
    assert sum(file.stat().st_size for name in RECORDED for file in (FOLDER / name).iterdir()) < 1_500_000
    for name in RECORDED:
        values = [value for value in diagnosis(name).history.config.values() if isinstance(value, str)]
        assert values and not [value for value in values if value.startswith(("/", "~"))]
