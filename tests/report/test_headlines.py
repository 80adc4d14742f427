"""The top of the page: the numbers of a run, its verdict and its alarms."""

import math
import re

import pytest
from tests.report.pages import Node, completion, parse, run_of

from klamp.doctor.alarms import ALARMS
from klamp.doctor.history import RunSettings
from klamp.report.alarm_section import alarm_section, anchors, numbered, verdict
from klamp.report.headlines import Headline, headlines, result, side_by_side
from klamp.report.run import ReportRun, ScoreFormat, coverage, skills_of, slots_of
from klamp.report.tokens import ranked

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
    late = run_of(scores=[(20, {"a": 0.5})], reward=[0.1] * 37)
    (found,) = [each for each in headlines(late, ["a"], POINTS) if each.label == "a"]
    assert (found.value, found.detail) == ("50.0", "not evaluated later")
    assert found.over == "evaluation after step 20", "not step 37"
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


def table(*runs: ReportRun) -> list[list[str]]:
    headings, rows = side_by_side(runs)
    return [[parse(cell).text for cell in row] for row in (headings, *rows)]


def test_side_by_side() -> None:
    runs = [run_of(name="a", reward=[0.5]), run_of(name="b", reward=[0.75], k3=[0, 0, 0, 0, 0, 0, 0.9])]
    expected = [
        ["run", "alarms", "KL (k3), nats/token", "Reward"],
        [" aruns/a, klamp run", "0the KL was not looked at", "–", "0.5"],
        [" bruns/b, klamp run", "1", "0.3highest 0.9 at step 7", "0.75"],
    ]

    assert table(*runs) == [list(column) for column in zip(*expected, strict=True)]
    assert table(*runs * 3)[:3] == expected, "many runs are rows"


def test_a_run_whose_steps_logged_no_kl_keeps_the_one_that_was_measured_after_training() -> None:
    free = run_of(name="free", reward=[0.5, 0.5], details={"outcome": {"kl/reverse": 0.6, "kl/reverse_sequence": 2.4}})
    held = run_of(name="held", reward=[0.5, 0.5], k3=[0.0, 0.1], details={"outcome": {"kl/reverse": 0.08}})
    found = said(headlines(free, [], POINTS))
    assert found["KL from the start (exact)"] == ("0.6", "nats/token", "on held-out prompts")
    assert found["KL from the start per completion (exact)"] == ("2.4", "nats", "on held-out prompts")
    assert table(free, held)[2:5] == [
        ["KL from the start (exact), nats/token", "0.6on held-out prompts", "0.08on held-out prompts"],
        ["KL from the start per completion (exact), nats", "2.4on held-out prompts", "–"],
        ["KL (k3), nats/token", "–", "0.1highest 0.1 at step 2"],
    ]


def test_curves_slots_and_skills() -> None:
    run = run_of(k3=[0.1, 0.2], k1=[0.3], scores=[(0, {"a": 0.5}), (2, {"a": 0.6, "b": 1.0})])
    assert run.curve("kl/k1") == {1: 0.3} and run.curve("eval/b") == {2: 1.0} and run.curve("none") == {}
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
    assert (points.scaled(0.996), points.unit, points.full) == (pytest.approx(99.6), "points of 100", (0.0, 100.0))
    assert (plain.scaled(0.996), plain.unit, plain.full) == (0.996, "score", (0.0,))


SPIKE = [0.0, 0.02, 0.03, 0.03, 0.03, 0.03, 0.7]
NOT_LOOKED_AT = "The KL was not looked at{}: no KL to the reference was found in the record."
SOUND = [0.0, 0.02, 0.03, 0.03]


def spiked(name: str = "a") -> ReportRun:
    rows = [completion(step=s, ref=(-1.0, -2.0 - s / 7, -0.5)) for s in range(1, 8)]
    return run_of(name=name, completions=rows, k3=SPIKE)


def section(*runs: ReportRun) -> Node:
    completions = ranked(runs)
    return parse(alarm_section(runs, anchors(completions, range(len(completions)))))


def test_a_finding_says_what_was_seen_and_what_to_do() -> None:
    made = section(spiked()).one("article")
    facts = {each.one("dt").text: each.one("dd").text for each in made.one("dl").all("div")}
    alarm = ALARMS["kl-spike"]
    assert [*facts] == ["Seen", "Likely", "Means", "Next step"]
    assert "0.7 nats" in facts["Seen"] and "rose by 0.67" in facts["Likely"]
    assert (facts["Means"], facts["Next step"]) == (alarm.means, alarm.next_step)
    assert (made.attributes["id"], made.one("h3").text) == ("alarm-1", "▲ 1 The KL jumped")
    assert made.one(of="since").text == "alarm: kl-spike, step 7"


def test_tokens_to_blame_are_linked_or_named_where_they_are_not_on_the_page() -> None:
    made = section(spiked())
    assert made.one("table").rows()[1] == ["2", "13.5 %", "5.0 %", "100 %", "step 7, completion 1, position 2"]
    assert (made.one("a").attributes["href"], made.one("a").attributes["data-position"]) == ("#c0", "1")
    run = spiked()
    made = parse(alarm_section([run], anchors(ranked([run]), [])))
    assert not made.all("a") and "step 7, completion 1, position 2" in made.text


def test_what_was_not_checked() -> None:
    run = run_of(k3=SOUND)
    made = section(run)
    assert "Nothing was found." in made.text
    lacks = {div.one("dt").text: div.one("dd").text for div in made.one("dl", of="unchecked").all("div")}
    assert lacks["retention"] == "needs evaluations"
    assert made.one("summary").text == f"{len(lacks)} of {run.diagnosis.concerned} could not be checked"


def test_verdicts() -> None:
    def said(*runs: ReportRun) -> tuple[str, str]:
        node = parse(verdict(runs)).one("p")
        return node.text, node.classes[1]

    sound, far = run_of(name="b", k3=SOUND), run_of(k3=[0.0] + [0.25] * 9, reward=[0.5] * 10)
    assert said(sound) == (f"✓ no alarm; {coverage(sound.diagnosis)}", "sound")
    assert said(far)[0].startswith("✓ no alarm, 1 note; ") and said(far)[1] == "note"
    assert said(spiked(), sound) == ("▲ 1 alarm, in 1 of 2 runs", "alarm")
    assert said(sound, sound) == ("✓ no alarm", "sound")


def test_a_verdict_is_green_only_where_the_kl_was_looked_at() -> None:
    """By the judgement of `klamp doctor`: one that no KL was read in ends with 2 there."""
    blind = run_of(name="blind", source="log", reward=[0.5, 0.6] * 5)
    free = run_of(name="free", source="log", reward=[0.5, 0.6] * 5, settings=RunSettings(beta=0.0))
    seen, empty = run_of(name="seen", k3=SOUND), run_of(name="empty")
    for runs, text, tone in (
        ([blind], r"● cannot tell: no alarm in what was looked at; .* could not be; the KL was not looked at", "note"),
        ([free], r"✓ no alarm; \d+ of \d+ alarms were checked, \d+ could not be", "sound"),
        ([seen, blind], "● cannot tell: no alarm in what was looked at; the KL was not looked at in blind", "note"),
        ([empty], r"● nothing could be checked; 0 of .*; the KL was not looked at", "note"),
        ([seen, empty], "● cannot tell: no alarm in what was looked at; the KL was not looked at in empty", "note"),
    ):
        node = parse(verdict(runs)).one("p")
        assert re.fullmatch(text, node.text) and node.classes[1] == tone, node.text
    told = [each.text for each in section(seen, blind).all("p")]
    assert told == ["Nothing was found in seen, blind.", NOT_LOOKED_AT.format(" in blind")]
    assert [each.text for each in section(empty).all("p")] == [NOT_LOOKED_AT.format("")]


def test_an_alarm_of_several_runs_is_told_once() -> None:
    runs = [spiked("a"), run_of(name="b", k3=[0.0] + [0.25] * 9, reward=[0.5] * 10), spiked("c")]
    assert numbered(runs) == {"kl-spike": 1, "kl-high": 2}, "alarms before notes"
    made = section(*runs)
    spike, high = made.all("article")
    assert [each.one(of="since").text[-11:] for each in (spike, high)] == ["2 of 3 runs", "1 of 3 runs"]
    seen = [each.text for each in spike.one("dl").all("div")[0].all("dd")]
    assert [text.partition(":")[0] for text in seen] == ["a, step 7", "c, step 7"]
    assert spike.text.count(ALARMS["kl-spike"].next_step) == 1
    assert [row[-1] for row in spike.one("table").rows()] == ["run", "a", "c"]
    assert {link.attributes["href"] for link in made.all("a")} == {"#c0", "#c1"}


def test_a_caution_stands_once_with_the_runs_that_it_was_said_to() -> None:
    runs = [run_of(name=name, k3=SOUND) for name in "abc"]
    for run, cautions in zip(runs, (["<b>no</b> template"], ["<b>no</b> template", "other"], []), strict=True):
        run.history.cautions.extend(cautions)
    told = [each.text for each in section(*runs).all("p") if each.text.startswith("Caution")]
    assert told == ["Caution. a, b: <b>no</b> template", "Caution. b: other"]
    assert next(each.text for each in section(runs[0]).all("p")) == "Caution. <b>no</b> template"
