"""The tables of what costs the most KL, with the completions behind each line."""

from __future__ import annotations

from tests.report.pages import Node, completion, parse, run_of

from klamp.report.choice import ranked
from klamp.report.cost import shares_of
from klamp.report.cost_section import LINKS, LONG, cost_section, pairs_of, shares_linked
from klamp.report.token_section import costs

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


def rows():
    return [
        completion(step=step, ref=(-1.0 - step / 4, -2.0, -0.5), prompt=f"{step % 2}+2=", reward=step / 10)
        for step in range(1, 7)
    ]


def section(*completions, kept: int = 100) -> Node:
    runs = [run_of(completions=completions)]
    found = ranked(runs)
    here = dict(list(enumerate(found))[:kept])
    spent, readers = costs(runs, found), [run.read for run in runs]
    return parse(cost_section(runs, found, here, spent, shares_of(spent, here, readers), readers))


def test_every_line_has_its_share_and_its_completions() -> None:
    made = section(*rows())
    words, positions, prompts = made.all("table")[:3]
    assert words.rows()[0] == ["word", "share", "nats", "nats each", "times", "where"]
    assert words.rows()[1][0] == "4" and words.rows()[1][1] == "100.0 %" and words.rows()[1][4] == "6"
    assert positions.rows()[1][0] == "1" and prompts.rows()[0][4] == "completions"
    assert [row[0] for row in prompts.rows()[1:]] == ["0+2=", "1+2="]
    assert [link.text for link in words.all("a")] == ["step 6, completion 1", "step 5, completion 1"][:LINKS]
    (button,) = words.all("button")
    assert button.attributes["data-cards"] == "0 1 2 3 4 5" and button.attributes["data-label"] == "word 4"
    assert "hidden" in button.attributes, "without a script it would do nothing"


def test_links_lead_to_what_is_on_the_page() -> None:
    runs = [run_of(completions=rows())]
    found = ranked(runs)
    behind = shares_of(costs(runs, found), dict(enumerate(found)), [run.read for run in runs])
    assert shares_linked(behind) == {n: frozenset({0}) for n in (0, 1, 2, 3)}, "two per line; prompts alternate"
    made = section(*rows(), kept=1)
    assert {link.attributes["href"] for link in made.all("a")} == {"#c0-0"}
    assert "not on the page" in section(*rows(), kept=0).text


def test_the_same_prompt_early_and_late() -> None:
    runs = [run_of(completions=rows())]
    found = ranked(runs)
    steps = [(a.completion.step, b.completion.step) for a, b in pairs_of(found, costs(runs, found))]
    assert steps == [(2, 6), (1, 5)]
    table = section(*rows()).one("table", of="pairs")
    assert table.rows()[0] == ["prompt", "early", "late"]
    assert "step 2, KL" in table.rows()[1][1] and "step 6, KL" in table.rows()[1][2]
    assert next(span.classes for span in table.all("div", of="side")[1].all("span")) == ["p3"]
    assert not section(rows()[0]).all("table", of="pairs"), "no prompt came up twice"


def test_long_completions_are_cut_in_the_table_only() -> None:
    n = LONG + 7
    both = [completion(step=s, tokens=["a"] * n, policy=[-1.0] * n, ref=[-2.0] * n, prompt="p") for s in (1, 2)]
    assert "(7 more tokens)" in section(*both).one("table", of="pairs").text


def test_what_models_wrote_is_text() -> None:
    both = [completion(step=s, tokens=(HOSTILE, "b", "c"), prompt=HOSTILE, ref=(-3.0, -2.0, -0.5)) for s in (1, 2)]
    made = section(*both)
    assert not made.all("img") and HOSTILE.replace("\u202e", "⟨U+202E⟩")[:20] in made.text
    assert "\u202e" not in made.text and all("\u202e" not in str(node.attributes) for node in made.walk())


def test_nothing_is_said_where_nothing_was_spent() -> None:
    assert section(completion()).text == ""
