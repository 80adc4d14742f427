"""What the report is told of a run."""

from __future__ import annotations

import pytest
from tests.report.pages import run_of

from klamp.diagnostics.history import RunSettings
from klamp.report.run import ScoreFormat, skills_of, slots_of


def test_curves_levels_slots_and_skills() -> None:
    run = run_of(k3=[0.1, 0.2], k1=[0.3], scores=[(0, {"a": 0.5}), (2, {"a": 0.6, "b": 1.0})])
    assert run.curve("kl/k3") == {1: 0.1, 2: 0.2} and run.curve("kl/k1") == {1: 0.3}
    assert run.curve("eval/a") == {0: 0.5, 2: 0.6} and run.curve("eval/b") == {2: 1.0} and run.curve("none") == {}
    assert run_of(k3=[0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7]).levels == (1, 0)
    assert run_of(k3=[0.0] + [0.25] * 9).levels == (0, 1)
    runs = [run_of(), run_of(details={"group": "beta-0"}), run_of(), run_of(details={"group": "beta-0"})]
    assert slots_of(runs) == [0, 1, 2, 1], "runs of one group look alike"
    trained = run_of(scores=[(0, {"b": 1.0, "a": 1.0})], settings=RunSettings(rl_skill="z"))
    assert skills_of([trained, run_of(details={"after": {"z": 1.0}})]) == ["z", "a", "b"], "the trained one first"


def test_scores_are_points_where_they_lie_between_0_and_1() -> None:
    points = ScoreFormat.fitting({"a": 0.5}, {"a": 1.0})
    assert (points.write(0.9375), points.change(0.5, 0.9375), points.change(0.9, 0.5)) == ("93.8", "+43.8", "−40.0")
    raw = ScoreFormat.of([run_of(details={"before": {"a": 0.5}, "after": {"a": 1.5}})])
    assert (raw.write(1.5), raw.change(0.5, 1.5), raw.write(None), raw.change(None, 1.0)) == ("1.5", "+1", "–", "–")


def test_scores_outside_the_range_of_one_evaluation_change_the_unit_of_all() -> None:
    assert ScoreFormat.of([run_of(scores=[(0, {"a": 0.5})])]).points
    plain = ScoreFormat.of([run_of(scores=[(0, {"a": 0.5})]), run_of(scores=[(5, {"b": -1.0})])])
    formats = (ScoreFormat(points=True), plain)
    assert [each.scaled(0.996) for each in formats] == pytest.approx([99.6, 0.996])
    assert [each.unit for each in formats] == ["points of 100", "score"]
    assert [each.full for each in formats] == [(0.0, 100.0), (0.0,)]
