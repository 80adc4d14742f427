"""What costs the most KL, added up by hand."""

from __future__ import annotations

import math

import pytest
from tests.report.pages import completion, run_of

from klamp.report.choice import ranked
from klamp.report.cost import Costs, costs_of, shares_of, words_of
from klamp.report.position import k3

NAN = math.nan


def costs(*completions, most: int = 10) -> Costs:
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
    found = costs(first, second, second)
    total = k3(1.0) + k3(-0.5) + 2 * (k3(0.25) + k3(2.0))
    assert found.total == pytest.approx(total)
    words = {cost.label: (cost.k3, cost.times) for cost in found.words}
    assert words["is"] == (pytest.approx(k3(-0.5) + 2 * k3(2.0)), 3)
    assert words["it"] == (pytest.approx(2 * k3(0.25)), 3) and words["so"] == (pytest.approx(k3(1.0)), 1)
    assert [cost.label for cost in found.words] == ["is", "so", "it"], "the costliest first"
    assert {cost.label: cost.times for cost in found.positions} == {"1": 3, "2": 3, "3": 1}
    assert sum(cost.k3 for cost in found.positions) == pytest.approx(total)
    assert [(cost.label, cost.times, cost.mean) for cost in found.prompts] == [
        ("q", 2, pytest.approx(k3(0.25) + k3(2.0))),
        ("p", 1, pytest.approx(k3(1.0) + k3(-0.5))),
    ]


def test_each_leads_to_its_completions_and_their_costliest_token() -> None:
    rows = [scored(["a", " a"], [0.1 * n, 0.2 * n], step=n) for n in (1, 3, 2)]
    shown = dict(enumerate(ranked([run_of(completions=rows)])))
    for kept, steps in ((shown, [3, 2, 1]), ({n: shown[n] for n in (0, 2)}, [3, 1]), ({}, [])):
        words, positions, _ = shares_of(costs(*rows), kept, [lambda token: token])
        assert [shown[share.shown].completion.step for share in words["a"]] == steps, "only of those on the page"
        assert {share.position for share in words["a"]} <= {1}
        assert [len(shares) for shares in positions.values()] == [len(steps)] * 2
    assert words_and_k3(rows[0]) == pytest.approx(2 * (k3(0.1) + k3(0.2))), "twins count each"


def words_and_k3(row) -> float:
    """What two twins of a completion add to their word."""
    found = costs(row, row)
    (share,) = shares_of(found, {0: ranked([run_of(completions=[row, row])])[0]}, [lambda token: token])[0]["a"]
    assert share.k3 == pytest.approx(found.words[0].k3)
    return share.k3


def test_only_what_the_reference_scored_counts() -> None:
    half = completion(tokens=["a", " b"], policy=[-1.0, -1.0], ref=[-2.0, NAN])
    masked = completion(tokens=["c"], policy=[-1.0], ref=[-9.0], trained=[False])
    alone = completion(tokens=["d"], policy=[-1.0], ref=None, sampler=[-5.0])
    found = costs(half, masked, alone)
    assert [cost.label for cost in found.words] == ["a"] and found.total == pytest.approx(k3(1.0))
    assert costs().total == 0 and not costs().words


def test_positions_begin_with_what_the_model_wrote_and_long_ones_are_joined() -> None:
    asked = scored(["q", "a"], [0.0, 1.0], sampled=[False, True], trained=[False, True])
    assert [cost.label for cost in costs(asked).positions] == ["1"]
    long = scored(["x"] * 640, [0.1] * 639 + [3.0])
    assert costs(long).positions[0].label == "631–640"
    assert len(costs(long, most=3).positions) == 3
