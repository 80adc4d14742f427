"""Two explanations side by side: what differs, what is the same, and what a nat costs in each."""

from __future__ import annotations

from typing import Any

import pytest

from klamp.verify.comparison import compare
from klamp.verify.explain import Explanation

REWARD, SCALED = "price: reward per nat", "price: standard deviations per nat"


def told(name: str = "a", **changes: Any) -> Explanation:
    values: dict[str, Any] = {
        "verdict": "Pulls.",
        "lines": (("value", "k3"), ("equation", "one"), ("", "two")),
        "cautions": ("of both.",),
        "numbers": {REWARD: 0.01, "noise": 2.0},
    }
    return Explanation(name=name, **values | changes)


def test_what_is_said_under_a_label_is_compared_with_all_its_lines() -> None:
    found = compare(told(), told("b", lines=(("value", "k3"), ("equation", "one"), ("", "three"), ("limits", "none"))))
    assert found.words == (("equation", "one; two", "one; three"), ("limits", "-", "none"))
    assert found.same == ("value",) and found.names == ("a", "b")
    assert compare(told(), told("b")).words == ()


def test_numbers_stand_beside_one_another() -> None:
    found = compare(told(), told("b", numbers={REWARD: 0.1}))
    assert found.numbers == ((REWARD, 0.01, 0.1), ("noise", 2.0, None))


def test_a_caution_is_that_of_whom_it_concerns() -> None:
    found = compare(told(), told("b", cautions=("of both.", "of b.")))
    assert found.cautions == (("b", "of b."),)


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({REWARD: 0.01}, {REWARD: 0.1}, "A nat costs 10 times as much in b as in a."),
        ({REWARD: 0.03}, {REWARD: 0.01}, "A nat costs 3 times as much in a as in b."),
        ({REWARD: 0.01}, {REWARD: 0.01 * (1 + 1e-9)}, "A nat costs the same in both."),
        ({REWARD: 0.01}, {REWARD: 0.0}, "A nat costs 0.01 in a, 0 in b."),
        ({REWARD: 0.01}, {SCALED: 0.01}, "Their prices are in different units"),
        ({REWARD: 0.01}, {}, "Pulls."),
    ],
)
def test_the_price_in_a_sentence(one: dict[str, float], other: dict[str, float], text: str) -> None:
    verdict = compare(told(numbers=one), told("b", numbers=other)).verdict
    assert verdict.startswith("Both do the same: Pulls.") and text in verdict


def test_two_verdicts_are_said_of_whom_they_are() -> None:
    assert compare(told(), told("b", verdict="Regularises nothing.")).verdict.startswith(
        "a: Pulls. b: Regularises nothing. A nat costs the same"
    )
