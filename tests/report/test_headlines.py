"""What the report is told of a run, and the numbers at the top."""

import math

import pytest
from tests.report.pages import parse, run_of

from klamp.doctor.history import RunSettings
from klamp.report.headlines import Headline, headlines, result, side_by_side
from klamp.report.run import ReportRun, ScoreFormat, skills_of, slots_of

POINTS = ScoreFormat(points=True)


def said(found: list[Headline]) -> dict[str, tuple[str, str, str]]:
    return {each.label: (each.value, each.unit, each.detail) for each in found}


def test_where_a_run_ended_and_from_where_it_came() -> None:
    reward = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    run = run_of(reward=reward, k3=[0, 0.5, 0, 0, 0, 0.1, 0.1, 0.1, 0.1, 0.2], length=[4] * 10)
    assert said(headlines(run, [], POINTS)) == {
        "Reward": ("0.8", "", "from 0.1"),
        "KL (k3)": ("0.12", "nats/token", "highest 0.5 at step 2"),
        "Length": ("4", "tokens", "constant"),
    }


def test_short_runs_end_with_their_last_half_and_what_is_not_finite_does_not_spoil_a_mean() -> None:
    assert said(headlines(run_of(reward=[0.0, 1.0]), [], POINTS))["Reward"] == ("1", "", "from 0")
    assert said(headlines(run_of(reward=[0.0, 0.1, 0.2, 0.4, 0.6]), [], POINTS))["Reward"] == ("0.5", "", "from 0")
    found = said(headlines(run_of(reward=[0.5, math.nan, 0.5], k3=[math.nan, math.nan]), [], POINTS))
    assert found["Reward"][0] == "0.5" and found["KL (k3)"] == ("NaN", "nats/token", "")
    run = run_of(k1=[0.1], k3=[0.2], exact=[0.3], kl__k1_sequence=[0.7])
    assert list(said(headlines(run, [], POINTS))) == ["KL (exact)", "KL per completion (k1)"]


def test_skills_before_and_after() -> None:
    settings = RunSettings(rl_skill="addition")
    scores = [(0, {"addition": 0.5, "reversal": 1.0}), (9, {"addition": 0.9, "reversal": 0.75})]
    run = run_of(scores=scores, settings=settings)
    assert said(headlines(run, ["addition", "reversal", "none"], POINTS)) == {
        "addition, trained": ("90.0", "points of 100", "from 50.0 (+40.0)"),
        "reversal, not trained": ("75.0", "points of 100", "from 100.0 (−25.0)"),
    }
    half = run_of(scores=scores[:1], settings=settings)
    assert said(headlines(half, ["addition"], POINTS)) == {
        "addition, trained": ("50.0", "points of 100", "not evaluated later")
    }
    over = {each.label: each.over for each in headlines(half, ["addition"], POINTS)}
    assert over == {"addition, trained": "evaluation after step 0"}
    late = run_of(scores=[(20, {"a": 0.5})], reward=[0.1] * 37)
    (found,) = [each for each in headlines(late, ["a"], POINTS) if each.label == "a"]
    assert (found.over, found.detail) == ("evaluation after step 20", "not evaluated later"), "not step 37"
    same = run_of(scores=[(20, {"a": 0.5}), (40, {"a": 0.5})])
    assert said(headlines(same, ["a"], POINTS))["a"][2] == "as at the first evaluation", "not before"


@pytest.mark.parametrize(
    ("after", "more", "text"),
    [
        ({"add": 0.9, "sub": 0.5}, {"kl/exact_sequence": [0.2, 0.53]}, "add +25.0 for 0.53 nats, nothing forgotten"),
        ({"add": 0.9, "sub": 0.4}, {"kl/k3_sequence": [0.2, 0.53]}, "add +25.0 for 0.53 nats, forgotten: sub −10.0"),
        ({"add": 0.6, "sub": 0.49996}, {}, "add −5.0, nothing forgotten"),
        ({"add": 0.9}, {}, "add +25.0"),
        ({}, {"reward": [0.25, 0.75], "kl/k3_sequence": [0.2, 2.0]}, "reward 0.25 to 0.75 for 2 nats"),
        ({}, {}, ""),
    ],
)
def test_the_result_of_a_run_is_one_line(after, more, text) -> None:
    before = {name: {"add": 0.65, "sub": 0.5}[name] for name in after}
    settings = RunSettings(rl_skill="add" if after else None)
    assert result(run_of(scores=[(0, before), (9, after)] if after else [], settings=settings, **more)) == text


def test_side_by_side() -> None:
    runs = [run_of(name="a", reward=[0.5]), run_of(name="b", reward=[0.75], k3=[0, 0, 0, 0, 0, 0, 0.9])]
    expected = [
        ["run", "alarms", "KL (k3), nats/token", "Reward"],
        [" aruns/a, klamp run", "0the KL was not looked at", "–", "0.5"],
        [" bruns/b, klamp run", "1", "0.3highest 0.9 at step 7", "0.75"],
    ]

    def table(*some: ReportRun) -> list[list[str]]:
        headings, rows = side_by_side(some)
        return [[parse(cell).text for cell in row] for row in (headings, *rows)]

    assert table(*runs) == [list(column) for column in zip(*expected, strict=True)]
    assert table(*runs * 3)[:3] == expected, "many runs are rows"


def test_a_run_whose_steps_logged_no_kl_keeps_the_one_that_was_measured_after_training() -> None:
    free = run_of(name="free", reward=[0.5, 0.5], details={"outcome": {"kl/reverse": 0.6, "kl/reverse_sequence": 2.4}})
    held = run_of(name="held", reward=[0.5, 0.5], k3=[0.0, 0.1], details={"outcome": {"kl/reverse": 0.08}})
    found = said(headlines(free, [], POINTS))
    assert found["KL from the start (exact)"] == ("0.6", "nats/token", "on held-out prompts")
    assert found["KL from the start per completion (exact)"] == ("2.4", "nats", "on held-out prompts")
    _, rows = side_by_side([free, held])
    table = [[parse(cell).text for cell in row] for row in rows]
    assert table[1:4] == [
        ["KL from the start (exact), nats/token", "0.6on held-out prompts", "0.08on held-out prompts"],
        ["KL from the start per completion (exact), nats", "2.4on held-out prompts", "–"],
        ["KL (k3), nats/token", "–", "0.1highest 0.1 at step 2"],
    ]


def test_curves_levels_slots_and_skills() -> None:
    run = run_of(k3=[0.1, 0.2], k1=[0.3], scores=[(0, {"a": 0.5}), (2, {"a": 0.6, "b": 1.0})])
    assert run.curve("kl/k3") == {1: 0.1, 2: 0.2} and run.curve("kl/k1") == {1: 0.3}
    assert run.curve("eval/a") == {0: 0.5, 2: 0.6} and run.curve("eval/b") == {2: 1.0} and run.curve("none") == {}
    runs = [run_of(), run_of(details={"group": "beta-0"}), run_of(), run_of(details={"group": "beta-0"})]
    assert slots_of(runs) == [0, 1, 2, 1], "runs of one group look alike"
    trained = run_of(scores=[(0, {"b": 1.0, "a": 1.0})], settings=RunSettings(rl_skill="z"))
    assert skills_of([trained, run_of(scores=[(0, {"z": 1.0})])]) == ["z", "a", "b"], "the trained one first"


def test_scores_are_points_where_they_lie_between_0_and_1_in_every_evaluation() -> None:
    points = ScoreFormat.fitting({"a": 0.5}, {"a": 1.0})
    assert (points.write(0.9375), points.change(0.5, 0.9375), points.change(0.9, 0.5)) == ("93.8", "+43.8", "−40.0")
    raw = ScoreFormat.of([run_of(scores=[(0, {"a": 0.5}), (9, {"a": 1.5})])])
    assert (raw.write(1.5), raw.change(0.5, 1.5), raw.write(None), raw.change(None, 1.0)) == ("1.5", "+1", "–", "–")
    assert ScoreFormat.of([run_of(scores=[(0, {"a": 0.5})])]).points
    trl = run_of(scores=[(10, {"reward": 0.216, "length/reward_correlation": 0.289})], source="TRL trainer state")
    tile = said(headlines(trl, ["reward"], ScoreFormat.of([trl])))["reward"]
    assert tile[:2] == ("0.216", "score"), "as the reward of the steps beside it; a correlation is no share"
    assert not ScoreFormat.of([trl, run_of(scores=[(0, {"a": 0.5})])]).points
    plain = ScoreFormat.of([run_of(scores=[(0, {"a": 0.5})]), run_of(scores=[(5, {"b": -1.0})])])
    formats = (ScoreFormat(points=True), plain)
    assert [each.scaled(0.996) for each in formats] == pytest.approx([99.6, 0.996])
    assert [each.unit for each in formats] == ["points of 100", "score"]
    assert [each.full for each in formats] == [(0.0, 100.0), (0.0,)]
