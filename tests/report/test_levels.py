"""Targets and budgets of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from tests.report.pages import run_of

from klamp.core.controllers import StepController
from klamp.report.chart import Line
from klamp.report.levels import levels_of


def lines(chart: str, curves: dict[str, list[float]] | None = None, **config: Any) -> list[tuple[float, float | None]]:
    run = run_of(details={"config": config}, k3=[0.1], **curves or {})
    return [(line.low, line.high) for line in levels_of(run, chart)]


def test_a_target_with_the_band_of_its_controller() -> None:
    band = [(pytest.approx(0.05), pytest.approx(0.15)), (0.1, None)]
    assert lines("kl", target_kl=0.1, kl_controller="step") == band
    factors = [2.0, 0.5, 1.2, 0.8]
    own = lines("kl", target_kl=0.1, kl_controller="step", kl_controller_factors=factors)
    assert own == [(pytest.approx(0.08), pytest.approx(0.12)), (0.1, None)]
    assert lines("kl", target_kl=0.1) == [(0.1, None)]
    assert lines("kl", target_kl=0.1, kl_controller="dual") == [(0.1, None)]
    assert lines("kl", target_kl=0.1, kl_controller="step", beta=0.0) == [(0.1, None)]
    assert lines("kl", target_kl=None) == lines("reward", target_kl=0.1) == []


@pytest.mark.parametrize(("kl", "rests"), [(0.051, True), (0.149, True), (0.049, False), (0.151, False)])
def test_in_the_band_beta_does_rest(kl: float, rests: bool) -> None:
    run = run_of(details={"config": {"target_kl": 0.1, "kl_controller": "step"}}, k3=[0.1])
    (band,) = [line for line in levels_of(run, "kl") if line.high is not None]
    controller = StepController(1.0, target=0.1)
    assert (controller.update(kl) == 1.0) is rests is (band.low <= kl <= (band.high or 0))


def test_a_guard() -> None:
    run = run_of(details={"config": {"kl_lr_guard": 0.3}}, k3=[0.1])
    assert levels_of(run, "kl") == [Line(label="learning-rate guard 0.3", low=0.3)]


def test_a_budget() -> None:
    clip = {"kl_clip_method": "hard", "kl_clip_threshold": 0.5}
    assert lines("kl-completion", **clip) == [], "nobody knows the length"
    assert lines("kl-completion", kl_reference_length=8, **clip) == [(4.0, None)]
    assert lines("kl-completion", {"kl__reference_length": [6.0]}, kl_reference_length=8, **clip) == [(3.0, None)]
    assert lines("kl-completion", use_per_token_kl_threshold=False, **clip) == [(0.5, None)]
    assert lines("kl-completion", {"kl__budget": [3.0]}, kl_reference_length=8, **clip) == [], "it has a curve"
    assert lines("kl-completion", kl_clip_threshold=0.5, kl_clip_method="none") == []


def test_the_alarm_of_the_sampler_is_a_line_without_any_configuration() -> None:
    assert lines("sampler") == [(0.01, None)]
