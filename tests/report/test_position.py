"""The KL by position."""

from __future__ import annotations

import math

import pytest
from tests.report.pages import completion, run_of

from klamp.report.position import BINS, by_position, k3, position_charts, thirds


def test_means_by_position() -> None:
    rows = [
        completion(policy=(-1.0, -2.0, -0.5), ref=(-1.5, -1.0, -0.5)),
        completion(policy=(-1.0, -2.0), ref=(-1.1, -2.5), tokens=("4", "2")),
    ]
    found = by_position(rows)
    assert {place: k1 for place, (_, k1) in found.items()} == pytest.approx({1: 0.3, 2: -0.25, 3: 0.0})
    assert found[1][0] == pytest.approx((math.expm1(-0.5) + 0.5 + math.expm1(-0.1) + 0.1) / 2)


def test_positions_count_from_the_first_token_that_was_written() -> None:
    row = completion(policy=(-9.0, -2.0, -0.5), ref=(-1.0, -2.5, -0.5), sampled=(False, True, True))
    assert {place: k1 for place, (_, k1) in by_position([row]).items()} == {1: 0.5, 2: 0.0}


def test_long_completions_are_joined_in_stretches() -> None:
    n = 1000
    row = completion(tokens=["a"] * n, policy=[-1.0] * n, ref=[-1.0 - i / n for i in range(n)])
    found = by_position([row])
    assert len(found) <= BINS and list(found)[:2] == [1.0, 17.0]
    assert found[1.0][1] == pytest.approx(7.5 / n)


def test_k3_is_bounded() -> None:
    assert k3(0.0) == 0 and k3(0.5) == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert math.isfinite(k3(-1e6))


def test_stages() -> None:
    assert thirds([]) == [] and thirds([1, 5]) == [[1, 5]]
    assert thirds([1, 2, 3, 4, 5, 6, 7]) == [[1, 2], [3, 4], [5, 6, 7]]


def test_charts_of_one_run_show_its_stages() -> None:
    rows = [completion(step=step, ref=(-1.0 - step, -2.0, -0.5)) for step in (10, 20, 30)]
    k3s, k1s = position_charts([run_of(completions=rows)])
    assert [series.label for series in k1s.series] == ["early steps (10)", "middle steps (20)", "late steps (30)"]
    assert [series.points[1.0] for series in k1s.series] == [10.0, 20.0, 30.0]
    assert k3s.series[0].points[1.0] == pytest.approx(math.exp(-10) - 1 + 10)
    assert k3s.axis == "token"


def test_charts_of_several_runs_show_how_they_ended() -> None:
    def run(name: str, size: float):
        return run_of(name=name, completions=[completion(step=s, ref=(-1.0 - size * s, -2.0, -0.5)) for s in (1, 2, 3)])

    _, k1s = position_charts([run("a", 1.0), run("b", 2.0), run_of(name="none")])
    assert {series.label: series.points[1.0] for series in k1s.series} == {"a": 3.0, "b": 6.0}


def test_without_a_reference_there_is_no_chart() -> None:
    assert position_charts([run_of(completions=[completion(ref=None)]), run_of()]) == []
