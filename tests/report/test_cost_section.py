"""The tables of what costs the most KL, with the completions behind each line."""

from __future__ import annotations

import math

import pytest
from tests.report.pages import Node, completion, parse, run_of

from klamp.report.completions import k3, ranked
from klamp.report.cost_section import (
    LINKS,
    Costs,
    cost_section,
    costs_of,
    shares_linked,
    shares_of,
    words_of,
)

NAN = math.nan


def costs_of_all(*completions, most: int = 10) -> Costs:
    found = ranked([run_of(completions=completions)])
    return costs_of(found, [lambda token: token], most=most)


def scored(tokens: list[str], ratios: list[float], **changes):
    return completion(tokens=tokens, policy=[-1.0] * len(tokens), ref=[-1.0 - ratio for ratio in ratios], **changes)


def test_words_join_letters_only() -> None:
    texts = [" mult", "ip", "ly", " 4", "2", "=", "<eos>", "so", "\n", "so"]
    assert [word for word, _ in words_of(texts)] == ["multiply", "4", "2", "=", "<eos>", "so", "\n", "so"]
    assert [inside for _, inside in words_of(texts)][:2] == [[0, 1, 2], [3]]
    assert list(words_of([])) == []


def test_the_cost_of_words_positions_and_prompts() -> None:
    first = scored(["so", " it", " is"], [1.0, 0.0, -0.5], prompt="p")
    second = scored(["it", " is"], [0.25, 2.0], prompt="q", step=2)
    found = costs_of_all(first, second, second)
    total = k3(1.0) + k3(-0.5) + 2 * (k3(0.25) + k3(2.0))
    assert found.total == pytest.approx(total)
    words = {cost.label: (cost.k3, cost.times) for cost in found.by["word"]}
    assert words["is"] == (pytest.approx(k3(-0.5) + 2 * k3(2.0)), 3)
    assert words["it"] == (pytest.approx(2 * k3(0.25)), 3) and words["so"] == (pytest.approx(k3(1.0)), 1)
    assert [cost.label for cost in found.by["word"]] == ["is", "so", "it"], "the costliest first"
    assert {cost.label: cost.times for cost in found.by["position"]} == {"1": 3, "2": 3, "3": 1}
    assert sum(cost.k3 for cost in found.by["position"]) == pytest.approx(total)
    assert [(cost.label, cost.times, cost.mean) for cost in found.by["prompt"]] == [
        ("q", 2, pytest.approx(k3(0.25) + k3(2.0))),
        ("p", 1, pytest.approx(k3(1.0) + k3(-0.5))),
    ]


def test_each_leads_to_its_completions_and_their_costliest_token() -> None:
    rows = [scored(["a", " a"], [0.1 * n, 0.2 * n], step=n) for n in (1, 3, 2)]
    shown = dict(enumerate(ranked([run_of(completions=rows)])))
    for kept, steps in ((shown, [3, 2, 1]), ({n: shown[n] for n in (0, 2)}, [3, 1]), ({}, [])):
        words, positions, _ = shares_of(costs_of_all(*rows), kept, [lambda token: token]).values()
        assert [shown[share.shown].completion.step for share in words["a"]] == steps, "only of those on the page"
        assert {share.position for share in words["a"]} <= {1}
        assert [len(shares) for shares in positions.values()] == [len(steps)] * 2
    assert words_and_k3(rows[0]) == pytest.approx(2 * (k3(0.1) + k3(0.2))), "twins count each"


def words_and_k3(row) -> float:
    """What two twins of a completion add to their word."""
    found = costs_of_all(row, row)
    (share,) = shares_of(found, {0: ranked([run_of(completions=[row, row])])[0]}, [lambda token: token])["word"]["a"]
    assert share.k3 == pytest.approx(found.by["word"][0].k3)
    return share.k3


def test_only_what_the_reference_scored_counts() -> None:
    half = completion(tokens=["a", " b"], policy=[-1.0, -1.0], ref=[-2.0, NAN])
    masked = completion(tokens=["c"], policy=[-1.0], ref=[-9.0], trained=[False])
    alone = completion(tokens=["d"], policy=[-1.0], ref=None, sampler=[-5.0])
    found = costs_of_all(half, masked, alone)
    assert [cost.label for cost in found.by["word"]] == ["a"] and found.total == pytest.approx(k3(1.0))
    assert costs_of_all().total == 0 and not costs_of_all().by["word"]


def test_positions_begin_with_what_the_model_wrote_and_long_ones_are_joined() -> None:
    asked = scored(["q", "a"], [0.0, 1.0], sampled=[False, True], trained=[False, True])
    assert [cost.label for cost in costs_of_all(asked).by["position"]] == ["1"]
    long = scored(["x"] * 640, [0.1] * 639 + [3.0])
    assert costs_of_all(long).by["position"][0].label == "631–640"
    assert len(costs_of_all(long, most=3).by["position"]) == 3


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
    readers = [run.read for run in runs]
    spent = costs_of(found, readers)
    return parse(cost_section(runs, found, here, spent, shares_of(spent, here, readers)))


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
    readers = [run.read for run in runs]
    behind = shares_of(costs_of(found, readers), dict(enumerate(found)), readers)
    assert shares_linked(behind) == {n: frozenset({0}) for n in (0, 1, 2, 3)}, "two per line; prompts alternate"
    made = section(*rows(), kept=1)
    assert {link.attributes["href"] for link in made.all("a")} == {"#c0-0"}
    assert "not on the page" in section(*rows(), kept=0).text


def test_what_models_wrote_is_text() -> None:
    both = [completion(step=s, tokens=(HOSTILE, "b", "c"), prompt=HOSTILE, ref=(-3.0, -2.0, -0.5)) for s in (1, 2)]
    made = section(*both)
    assert not made.all("img") and HOSTILE.replace("\u202e", "⟨U+202E⟩")[:20] in made.text
    assert "\u202e" not in made.text and all("\u202e" not in str(node.attributes) for node in made.walk())


def test_nothing_is_said_where_nothing_was_spent() -> None:
    assert section(completion()).text == ""
