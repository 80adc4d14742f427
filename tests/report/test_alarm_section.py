"""Alarms on the page."""

import re

from tests.report.pages import Node, completion, parse, run_of

from klamp.doctor.alarms import ALARMS
from klamp.doctor.history import RunSettings
from klamp.report.alarm_section import alarm_section, anchors, numbered, verdict
from klamp.report.run import ReportRun, coverage
from klamp.report.tokens import ranked

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
    blind, free = (
        run_of(name=name, source="log", settings=RunSettings(beta=beta), reward=[0.5, 0.6] * 5, gradient=[0.2] * 8)
        for name, beta in (("blind", None), ("free", 0.0))
    )
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
