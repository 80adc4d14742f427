"""The tables of what costs the most KL."""

from __future__ import annotations

import math

import pytest
from tests.report.pages import Node, completion, parse, run_of

from klamp.diagnostics.alarms_tokens import k3
from klamp.report.completions import ranked
from klamp.report.cost_section import Costs, cost_section, costs_of, words_of

NAN = math.nan


def costs_of_all(*completions) -> Costs:
    found = ranked([run_of(completions=completions)])
    return costs_of(found, [lambda token: token])


def scored(tokens: list[str], ratios: list[float], **changes):
    return completion(tokens=tokens, policy=[-1.0] * len(tokens), ref=[-1.0 - ratio for ratio in ratios], **changes)


def test_words_join_letters_only() -> None:
    texts = [" mult", "ip", "ly", " 4", "2", "=", "<eos>", "so", "\n", "so"]
    assert [word for word, _ in words_of(texts)] == ["multiply", "4", "2", "=", "<eos>", "so", "\n", "so"]
    assert [inside for _, inside in words_of(texts)][:2] == [[0, 1, 2], [3]]
    assert list(words_of([])) == []


def test_the_cost_of_words_and_prompts() -> None:
    first = scored(["so", " it", " is"], [1.0, 0.0, -0.5], prompt="p")
    second = scored(["it", " is"], [0.25, 2.0], prompt="q", step=2)
    found = costs_of_all(first, second, second)
    total = k3(1.0) + k3(-0.5) + 2 * (k3(0.25) + k3(2.0))
    assert found.total == pytest.approx(total)
    words = {cost.label: (cost.k3, cost.times) for cost in found.by["word"]}
    assert words["is"] == (pytest.approx(k3(-0.5) + 2 * k3(2.0)), 3)
    assert words["it"] == (pytest.approx(2 * k3(0.25)), 3) and words["so"] == (pytest.approx(k3(1.0)), 1)
    assert [cost.label for cost in found.by["word"]] == ["is", "so", "it"], "the costliest first"
    assert [(cost.label, cost.times, cost.mean) for cost in found.by["prompt"]] == [
        ("q", 2, pytest.approx(k3(0.25) + k3(2.0))),
        ("p", 1, pytest.approx(k3(1.0) + k3(-0.5))),
    ]


def test_only_what_the_reference_scored_counts() -> None:
    half = completion(tokens=["a", " b"], policy=[-1.0, -1.0], ref=[-2.0, NAN])
    masked = completion(tokens=["c"], policy=[-1.0], ref=[-9.0], trained=[False])
    alone = completion(tokens=["d"], policy=[-1.0], ref=None, sampler=[-5.0])
    found = costs_of_all(half, masked, alone)
    assert [cost.label for cost in found.by["word"]] == ["a"] and found.total == pytest.approx(k3(1.0))
    assert costs_of_all().total == 0 and not costs_of_all().by["word"]


def rows():
    return [
        completion(step=step, ref=(-1.0 - step / 4, -2.0, -0.5), prompt=f"{step % 2}+2=", reward=step / 10)
        for step in range(1, 7)
    ]


def section(*completions) -> Node:
    runs = [run_of(completions=completions)]
    found = ranked(runs)
    return parse(cost_section(costs_of(found, [run.read for run in runs])))


def test_every_line_has_its_share() -> None:
    words, prompts = section(*rows()).all("table")
    assert words.rows()[0] == ["word", "share", "nats", "nats each", "times"]
    assert words.rows()[1][:2] == ["4", "100.0 %"] and words.rows()[1][4] == "6"
    assert prompts.rows()[0][4] == "completions"
    assert [row[0] for row in prompts.rows()[1:]] == ["0+2=", "1+2="]
    assert section(completion()).text == "", "nothing was spent"
