"""Rules over advantages, evaluations and settings: where each threshold lies."""

from __future__ import annotations

import math

import pytest
from tests.diagnostics.histories import completion, history_of, look
from tests.report.pages import run_of

from klamp.diagnostics.history import History, Row, RunSettings
from klamp.report.run import ScoreFormat


@pytest.mark.parametrize(
    ("curves", "alarmed"),
    [
        ({"k3": [999.0]}, False),
        ({"k3": [1e3]}, True),
        ({"train__grad_norm": [1e5]}, True),
        ({"train__grad_norm": [999.0]}, False),
        ({"speed__tokens_per_second": [1e6]}, False),
        ({"policy__entropy": [math.nan]}, True),
        ({"train__loss": [-math.inf]}, True),
    ],
)
def test_huge_values(curves: dict, alarmed: bool) -> None:
    assert (look("huge-values", history_of(**curves)) is not None) is alarmed


@pytest.mark.parametrize(
    ("policy", "trained", "text"),
    [
        ((-1.0, math.nan, -0.5), (True, True, True), "1 trained token has no finite log-probability"),
        ((-math.inf, math.nan, -0.5), (True, True, False), "2 trained tokens have no finite log-probability"),
        ((-1.0, math.nan, -0.5), (True, False, True), None),
        ((math.nan, -2.0, -0.5), None, None),  # without a mask the row may begin with its prompt
    ],
)
def test_trained_tokens_without_a_log_probability(policy: tuple, trained: tuple | None, text: str | None) -> None:
    history = history_of(k1=[0.0])
    history.add_completions([completion(policy=policy, trained=trained)])
    found = look("huge-values", history)
    assert (None if found is None else found.text) == text


def test_advantages_that_are_too_large() -> None:
    assert look("advantage-scale", history_of(advantage__max=[10.5])) is not None
    assert look("advantage-scale", history_of(advantage__max=[2.5], advantage__min=[-10.5])) is not None
    assert look("advantage-scale", history_of(advantage__max=[9.9])) is None
    history = history_of(reward=[1.0])
    history.add_completions([completion(reward=3.0, advantage=-11.0)])
    assert look("advantage-scale", history) is not None


@pytest.mark.parametrize(
    ("spread", "saturated", "settings", "alarmed"),
    [
        (1e-5, 0.0, RunSettings(), True),
        (1e-5, 0.0, RunSettings(scale_rewards="none"), False),
        (1e-5, 0.0, RunSettings(loss_type="dr_grpo"), False),
        (0.3, 0.0, RunSettings(), False),
        (0.0007, 0.998, RunSettings(), False),  # one group of 500, of a rewards' usual spread
        (0.0, 1.0, RunSettings(), False),
    ],
)
def test_rewards_that_differ_by_rounding(spread: float, saturated: float, settings: RunSettings, alarmed: bool) -> None:
    history = history_of(settings=settings, reward=[0.7], reward_std=[spread], groups__saturated=[saturated])
    assert (look("advantage-scale", history) is not None) is alarmed


def test_a_signal_from_equal_rewards() -> None:
    def history(settings: RunSettings, **second: float) -> History:
        made = history_of(settings=settings, reward=[1.0])
        rows = [{"reward": 1.0, "advantage": 0.7}, {"reward": 1.0, "advantage": -0.7} | second]
        made.add_completions([completion(group="2+2", **row) for row in rows])
        return made

    assert look("advantage-scale", history(RunSettings())) is not None
    assert look("advantage-scale", history(RunSettings(kl_in_reward=True))) is None, "there the KL makes the difference"
    assert look("advantage-scale", history(RunSettings(), reward=0.0)) is None
    assert look("advantage-scale", history(RunSettings(), advantage=0.7)) is None


@pytest.mark.parametrize(
    ("changes", "curves", "alarmed"),
    [
        ({}, {}, True),
        ({"loss_type": "grpo"}, {}, False),
        ({"verifier": "model"}, {}, False),
        ({"verifier": None}, {}, False),
        ({"beta": 0.0}, {}, False),
        ({"beta": 0.0}, {"beta": [0.02]}, True),
        ({"beta": None}, {"k3": [0.1]}, True),
    ],
)
def test_dr_grpo_with_kl(changes: dict, curves: dict, alarmed: bool) -> None:
    settings = RunSettings(**{"loss_type": "dr_grpo", "verifier": "rules", "beta": 0.04} | changes)
    assert (look("dr-grpo-with-kl", history_of(settings=settings, **curves)) is not None) is alarmed


@pytest.mark.parametrize(
    ("before", "after", "size", "alarmed"),
    [
        (0.82, 0.76, None, True),
        (0.82, 0.78, None, False),
        (0.82, 0.76, 32, False),  # six points of 32 examples are noise
        (0.82, 0.45, 32, True),
        (40.0, 37.0, None, True),
        (40.0, 39.0, None, False),
        (0.5, 0.9, None, False),
    ],
)
def test_retention(before: float, after: float, size: int | None, alarmed: bool) -> None:
    history = History(settings=RunSettings(rl_skill="math", eval_size=size))
    history.evaluations = [
        Row(step=0, metrics={"math": 0.9, "chat": before}),
        Row(step=5, metrics={"math": 0.1, "chat": after}),
    ]
    found = look("retention", history)
    assert (found is not None) is alarmed
    assert found is None or ("chat" in found.text and "math" not in found.text)


def test_retention_writes_scores_as_the_report_does() -> None:
    history = History(settings=RunSettings(rl_skill="math"))
    history.evaluations = [Row(step=0, metrics={"chat": 0.99609375}), Row(step=5, metrics={"chat": 0.5})]
    scores = ScoreFormat.of([run_of(scores=[(row.step, dict(row.metrics)) for row in history.evaluations])])
    found = look("retention", history)
    assert found is not None and found.text == f"chat went from {scores.write(0.99609375)} of 100 to 50.0 of 100"
    history.evaluations.append(Row(step=6, metrics={"chat": 0.5, "essays": 7.0}))
    found = look("retention", history)
    assert found is not None and found.text == "chat went from 0.996 to 0.5", "one of them is no share"
