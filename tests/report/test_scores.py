"""Scores are written as in the terminal."""

from __future__ import annotations

import pytest
from tests.report.pages import run_of

from klamp.cli.columns import Scale
from klamp.report.scores import Scores


@pytest.mark.parametrize("scores", [{"a": 0.9963, "b": 0.0}, {"a": 1.0, "b": 0.5}, {"a": 12.345, "b": 0.25}])
def test_page_and_terminal_agree(scores: dict[str, float]) -> None:
    run = run_of(details={"before": {"a": 0.1}, "after": scores})
    page, terminal = Scores.of([run]), Scale.of({"a": 0.1}, scores)
    assert page.points is terminal.points
    for value in scores.values():
        assert page.write(value) == terminal.write(value)
        assert page.change(0.5, value).replace("−", "-") == terminal.change(0.5, value)
    assert page.write(None) == page.change(None, 0.5) == "–"


def test_the_numbers_of_a_chart_have_the_same_unit() -> None:
    assert [Scores(points).scaled(0.996) for points in (True, False)] == pytest.approx([99.6, 0.996])
    assert [Scores(points).unit for points in (True, False)] == ["points of 100", "score"]
    assert [Scores(points).full for points in (True, False)] == [(0.0, 100.0), (0.0,)]


def test_one_evaluation_outside_the_range_changes_all() -> None:
    assert Scores.of([run_of(scores=[(0, {"a": 0.5})])]).points
    assert not Scores.of([run_of(scores=[(0, {"a": 0.5})]), run_of(scores=[(5, {"b": -1.0})])]).points
