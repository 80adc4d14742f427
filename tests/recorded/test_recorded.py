"""What the doctor finds in recorded runs, and what was told while they went on: the same.

The records lie beside this file; `python -m tests.recorded` trains the runs and writes them anew. What any seed of the
same runs must show is tested live, in tests/training/test_planted_runs.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from tests.recorded.plants import RECORDED, RUNS
from tests.recorded.record import FOLDER, lines, said, short

from klamp.cli import main
from klamp.diagnostics.alarms import ALARMS
from klamp.diagnostics.alarms_run import TRUNCATED
from klamp.diagnostics.doctor import Diagnosis, Finding, examine
from klamp.records import read_record
from klamp.records.klamp_run import read_config
from klamp.training.folders import scores_of
from klamp.training.observers import AlarmObserver, Observer, RunInfo

FOUND: dict[str, dict[str, int]] = {
    "adapter-not-zero": {"step-zero-kl": 1},
    "adapter-not-synced": {"sampler-mismatch": 3, "k3-far-above-k1": 5, "negative-k1": 22, "kl-high": 7},
    "exploded-not-synced": {"k3-far-above-k1": 3, "kl-spike": 3, "sampler-mismatch": 3, "huge-values": 3},
    "reference-that-follows": {"repetition": 12, "detached-reference": 20, "kl-low": 20},
    "one-wrong-update": {"kl-spike": 9, "spike-with-reward-drop": 9, "kl-far": 10, "kl-high": 9},
    "exploding-rate": {"kl-spike": 3, "kl-far": 5, "kl-high": 5},
    "cut-answers": {"truncated": 5},
    "large-advantages": {"advantage-scale": 1},
    "divided-noise": {"advantage-scale": 1},
    "low-target": {"beta-runaway": 18, "kl-dominates": 19, "kl-high": 11},
    "lost-end-token": {"end-token-lost": 1},
    "dr-grpo-with-a-rule": {"dr-grpo-with-kl": 0},
    "lost-skill": {"reward-collapse": 11, "retention": 12},
    "little-learning": {"kl-low": 20},
    "diluted": {"dilution": 34, "length-exploited": 36, "kl-high": 5},
    "rate-hundredfold": {"kl-far": 8, "reward-collapse": 10, "saturated": 25, "kl-high": 5},
    "rate-thirtyfold": {
        "kl-spike": 8,
        "spike-with-reward-drop": 8,
        "reward-collapse": 11,
        "kl-far": 15,
        "kl-high": 7,
    },
    "drift": {"truncated": 5, "saturated": 20, "kl-growing": 30, "kl-high": 12},
    "paid-length": {"length-exploited": 20},
    "one-word": {"repetition": 7},
    "constant-reward": {"truncated": 5, "saturated": 20, "kl-low": 20},
    "beta-too-high": {"kl-dominates": 10},
    "beta-too-low": {"kl-inert": 20, "kl-high": 13},
    "clip-too-narrow": {"kl-inert": 20},
    "wrong-reference": {"reference-differs": 1},
    "low-limit": {"truncated": 5},
    "sound": {"kl-high": 16},
    "sound-beta-0": {},
    "sound-target": {},
    "sound-in-the-reward": {"kl-high": 16},
    "sound-moving-reference": {},
    "short-adapter": {},
    "cut-by-design-gpt2": {"kl-high": 5},
    "paid-for-shortness": {"kl-high": 5},
}
"""Record -> what is found in it, with the step after which it rose."""

SEEN: list[tuple[str, str, str]] = [
    ("adapter-not-synced", "sampler-mismatch", "sampler/k1 is 0.0805, sampler/k3 is 0.0543 nats per token"),
    ("adapter-not-synced", "negative-k1", "below 0 in 20 steps in a row"),
    ("exploded-not-synced", "huge-values", "kl/k3 is 4.8e+05"),
    ("exploded-not-synced", "k3-far-above-k1", "kl/k3 is 4.76e+05 nats per token in this step"),
    ("reference-that-follows", "detached-reference", "at least 0.249 nats per completion; the KL says 0"),
    ("one-wrong-update", "spike-with-reward-drop", "jumped to 8.06 nats per token and the reward fell from 0.663 to 0"),
    ("large-advantages", "advantage-scale", "an advantage of 44.4"),
    ("divided-noise", "advantage-scale", "differ by 1.5e-05 within their groups"),
    ("low-target", "beta-runaway", "beta went from 0.1 to 12.3"),
    ("lost-end-token", "end-token-lost", "in 4 of 4 completions the last token ('x') is not trained on"),
    ("dr-grpo-with-a-rule", "dr-grpo-with-kl", "loss_type is dr_grpo, beta 0.04, the reward is a rule's"),
    ("lost-skill", "retention", "subtraction went from 100.0 of 100 to 34.4 of 100"),
    ("drift", "kl-growing", "grew from 0.112 to 0.369 nats per token"),
    ("paid-length", "length-exploited", "completions grew from 11.2 to 20.4 tokens"),
    ("one-word", "repetition", "56 % of the tokens stand in a pair that was in their completion before"),
    ("constant-reward", "saturated", "100 % of the groups of 20 steps have equal rewards at 1"),
    ("beta-too-high", "kl-dominates", "a nat of a completion costs 50 of reward"),
    ("beta-too-low", "kl-inert", "0.019 % of the reward's strength"),
    ("clip-too-narrow", "kl-inert", "in 20 steps no completion exceeded the clip's budget of 2.5 nats"),
    ("wrong-reference", "reference-differs", "kl/exact is 0.62 nats per token to the chosen reference"),
    ("low-limit", "truncated", "as from the start"),
    ("diluted", "dilution", "the KL of a whole completion is 1.33 times what it was"),
    ("little-learning", "kl-low", "the KL is 7.25e-07 nats per token"),
]
"""Record, alarm, and a part of its evidence."""

CAUSES: list[tuple[str, str, str]] = [
    ("rate-hundredfold", "kl-far", "the learning rate (up to 0.007): one step moved the policy by"),
    ("rate-hundredfold", "reward-collapse", "the learning rate (up to 0.009): one step moved the policy by"),
    ("rate-hundredfold", "saturated", "the reward was 0.688 and is gone"),
    ("rate-thirtyfold", "kl-far", "the learning rate (up to 0.003): one step moved the policy by"),
    ("rate-thirtyfold", "reward-collapse", "the learning rate (up to 0.003): one step moved the policy by"),
    ("exploding-rate", "kl-spike", "the learning rate (up to 1): one step moved the policy by"),
    ("one-wrong-update", "kl-spike", "the learning rate (up to 0.0001): one step moved the policy by"),
    ("adapter-not-synced", "sampler-mismatch", "it came with the updates"),
    ("lost-skill", "reward-collapse", "no KL holds the policy (beta is 0)"),
    ("drift", "kl-growing", "no KL holds the policy (beta is 0)"),
    ("paid-length", "length-exploited", "the reward pays for length"),
    ("one-word", "repetition", "the reward pays for length"),
    ("constant-reward", "saturated", "every completion earns the same"),
]
"""Record, alarm, and how the likeliest cause begins."""

WITH_TOKENS: dict[str, dict[str, int]] = {
    "adapter-not-zero": {"step-zero-kl": 1},
    "adapter-not-synced": {"sampler-mismatch": 3, "k3-far-above-k1": 5},
    "exploded-not-synced": {"k3-far-above-k1": 3, "kl-spike": 3, "sampler-mismatch": 3},
    "one-wrong-update": {"kl-spike": 9, "spike-with-reward-drop": 9, "kl-far": 10},
    "wrong-reference": {"reference-differs": 1},
}
"""Record -> the alarms that show five tokens, with the step that those are of."""

IN_NO_RUN = {
    "mask-on-prompt": "klamp's own loop hands out completions without their prompts; tests/diagnostics/"
    "test_alarms_tokens.py has it on the rows of other trainers",
}
"""Alarm that no record shows -> why."""


@cache
def diagnosis(name: str) -> Diagnosis:
    return examine(read_record(FOLDER / name))


def finding(record: str, alarm: str) -> Finding:
    found = {each.alarm.name: each for each in diagnosis(record).findings}
    return found[alarm]


def test_every_recorded_run_is_in_the_tree_and_in_the_table() -> None:
    assert {folder.name for folder in FOLDER.iterdir() if (folder / "metrics.jsonl").is_file()} == set(RECORDED)
    assert set(FOUND) == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_found_and_when_it_rose(name: str) -> None:
    assert {each.alarm.name: each.first_step for each in diagnosis(name).findings} == FOUND[name]
    assert RUNS[name].misses(diagnosis(name)) == [], "what any seed must show"


@pytest.mark.parametrize(("name", "alarm", "text"), SEEN)
def test_what_was_seen(name: str, alarm: str, text: str) -> None:
    assert text in finding(name, alarm).evidence.text


@pytest.mark.parametrize(("name", "alarm", "beginning"), CAUSES)
def test_the_likeliest_cause(name: str, alarm: str, beginning: str) -> None:
    assert finding(name, alarm).evidence.causes[0].startswith(beginning)


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_the_tokens_to_blame(name: str) -> None:
    shown = {each.alarm.name: each.evidence.tokens for each in diagnosis(name).findings if each.evidence.tokens}
    assert {alarm: {token.step for token in tokens} for alarm, tokens in shown.items()} == {
        alarm: {step} for alarm, step in WITH_TOKENS[name].items()
    }
    assert all(len(tokens) == 5 for tokens in shown.values())


def test_what_is_only_a_note() -> None:
    found = {each.alarm.name: each.alarm.level for name in RECORDED for each in diagnosis(name).findings}
    assert {name for name, level in found.items() if level == "note"} == {"kl-high", "kl-low"}


def test_every_alarm_is_in_some_recorded_run() -> None:
    found = {alarm for alarms in FOUND.values() for alarm in alarms}
    assert found.isdisjoint(IN_NO_RUN)
    assert found | IN_NO_RUN.keys() == set(ALARMS)


@pytest.mark.parametrize("name", RECORDED)
def test_the_command_fails_where_an_alarm_rose(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    alarmed = [alarm for alarm in FOUND[name] if ALARMS[alarm].level == "alarm"]
    assert main(["doctor", str(FOLDER / name)]) == int(bool(alarmed))
    out = capsys.readouterr().out
    assert all(alarm in out for alarm in alarmed)
    assert ("no alarm; " in out) == (not alarmed)


# while it happened ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_what_the_run_told_is_what_is_found_afterwards(name: str) -> None:
    told = lines(FOLDER / name / "alarms.jsonl")
    found = {each.alarm.name: each for each in diagnosis(name).findings}
    assert {row["name"]: row["step"] for row in told} == FOUND[name] and len(told) == len(found)
    for row in told:
        seen = found[row["name"]]
        assert (row["level"], row["evidence"], row["causes"]) == (
            seen.alarm.level,
            seen.evidence.text,
            list(seen.evidence.causes),
        )


@pytest.mark.parametrize("name", RECORDED)
def test_a_run_that_goes_on_is_told_what_is_found_afterwards(name: str, tmp_path: Path) -> None:
    told: list[Finding] = []

    class Told(Observer):
        def on_alarm(self, finding: Finding) -> None:
            told.append(finding)

    settings = read_record(FOLDER / name).settings
    observer = AlarmObserver(lambda call: call(Told()), rl_skill=settings.rl_skill or "")
    observer.on_start(info(FOLDER / name, tmp_path))
    completions = lines(FOLDER / name / "completions.jsonl")
    for row in lines(FOLDER / name / "metrics.jsonl"):
        scores, step = scores_of(row), row["step"]
        if scores:
            observer.on_evaluation(step, scores)
            continue
        written = [each for each in completions if each["step"] == step]
        if written:
            observer.on_completions(step, written)
        observer.on_step(step, {metric: value for metric, value in row.items() if metric != "step"})
    found = said(diagnosis(name))
    assert sorted(said(replace(diagnosis(name), findings=told))) == sorted(found)
    assert len(told) == len(found), "each one once"


def info(record: Path, folder: Path) -> RunInfo:
    """The recorded run before its first step, in a folder where nothing lies yet."""
    known = {"parameters": 1, "trainable_parameters": 1, "reference": "", "device": "", "processes": 1}
    return RunInfo(config=read_config(record)[1], output_dir=folder, start_step=0, **known)


# the runs behind the findings ----------------------------------------------------------------------------------------


def curve(name: str, metric: str) -> list[float]:
    return [row[metric] for row in lines(FOLDER / name / "metrics.jsonl") if metric in row]


def test_a_learning_rate_is_named_and_not_the_beta() -> None:
    collapse, lost = finding("rate-hundredfold", "reward-collapse"), finding("rate-hundredfold", "saturated")
    assert "raise beta" not in collapse.alarm.next_step, "beta was not the fault"
    assert lost.first_step > collapse.first_step


def test_a_dilution_is_longer_has_less_per_token_and_no_less_in_all() -> None:
    end = FOUND["diluted"]["dilution"]
    length, kl, whole = (
        fmean(curve("diluted", name)[end - 10 : end]) / fmean(curve("diluted", name)[end - 20 : end - 10])
        for name in ("length/mean", "kl/exact", "kl/exact_sequence")
    )
    assert length > 1.2 and kl < 1 / 1.2 and whole > 0.9
    assert fmean(curve("paid-for-shortness", "kl/exact_sequence")[-10:]) > 2, "the quiet one learned the same"


def test_what_is_cut_by_design_is_cut_in_every_step() -> None:
    assert min(curve("cut-by-design-gpt2", "length/truncated")) > TRUNCATED.value


# the records ---------------------------------------------------------------------------------------------------------


def test_records_are_small_and_name_no_place() -> None:
    files = [file for name in RECORDED for file in (FOLDER / name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 1_500_000
    for name in RECORDED:
        config, _ = read_config(FOLDER / name)
        assert not [value for value in config.values() if isinstance(value, str) and value.startswith(("/", "~"))]


def test_numbers_are_shortened_wherever_they_stand() -> None:
    assert short({"a": [1.23456789, None, "x", True], "b": 2, "c": float("inf")}) == {
        "a": [1.23457, None, "x", True],
        "b": 2,
        "c": float("inf"),
    }
