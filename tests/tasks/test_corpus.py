"""The training rows of the base model: correct where they should be, careless where and as often as they say."""

from __future__ import annotations

import random

import pytest

from klamp.tasks.arithmetic import HELD_OUT_SHARE, arithmetic_tokenizer
from klamp.tasks.base import is_held_out
from klamp.tasks.base_model import IGNORED, careless_sum, corpus, training_tensors

MIXTURE = {"addition": 0.5, "subtraction": 0.3, "reversal": 0.2}


def share(left: int, right: int, value: int, carelessness: float, draws: int = 4000) -> float:
    rng = random.Random(0)
    return sum(careless_sum(left, right, rng, carelessness) == value for _ in range(draws)) / draws


def test_without_carelessness_every_sum_is_right() -> None:
    for left in range(10, 100):
        for right in range(10, 100):
            assert careless_sum(left, right, random.Random(0), 0.0) == left + right


@pytest.mark.parametrize(
    ("left", "right", "slip", "odds"),
    [
        (17, 27, 34, 0.6),  # a heavy column, 7 + 7: the carry is lost with the full odds
        (16, 27, 33, 0.3),  # a light one, 6 + 7: with half of them
        (70, 70, 40, 0.6),  # the tens, likewise
        (60, 70, 30, 0.3),
    ],
)
def test_carries_are_forgotten_as_often_as_documented(left: int, right: int, slip: int, odds: float) -> None:
    assert share(left, right, slip, 0.6) == pytest.approx(odds, abs=0.03)
    assert share(left, right, left + right, 0.6) == pytest.approx(1 - odds, abs=0.03)


def test_a_sum_without_a_carry_is_never_wrong() -> None:
    assert share(14, 25, 39, 1.0) == 1.0


def test_a_forgotten_carry_can_undo_the_next_one() -> None:
    # 6 + 6 carries, and only with that carry do the tens, 4 + 5, reach ten
    assert share(46, 56, 92, 0.6) == pytest.approx(0.3, abs=0.03)
    assert share(46, 56, 2, 0.6) == pytest.approx(0.7 * 0.3, abs=0.03)


def test_rows_come_from_the_training_side_in_the_mixture_that_was_asked_for() -> None:
    rows = list(corpus(MIXTURE, 4000, carelessness=0.0, seed=0))
    assert not any(is_held_out(prompt, HELD_OUT_SHARE) for prompt, _ in rows)
    sums = [(p, a) for p, a in rows if "+" in p]
    assert len(sums) / len(rows) == pytest.approx(0.5, abs=0.03)
    assert sum(p.startswith("rev") for p, _ in rows) / len(rows) == pytest.approx(0.2, abs=0.03)
    assert all(eval(p[:-1]) == int(a) for p, a in sums)


def test_only_additions_are_careless_and_the_seed_decides() -> None:
    rows = list(corpus(MIXTURE, 2000, carelessness=0.6, seed=3))
    assert rows == list(corpus(MIXTURE, 2000, carelessness=0.6, seed=3))
    assert rows != list(corpus(MIXTURE, 2000, carelessness=0.6, seed=4))
    right = {kind: [eval(p[:-1]) == int(a) for p, a in rows if kind in p] for kind in "+-"}
    assert all(right["-"])
    assert sum(right["+"]) / len(right["+"]) == pytest.approx(0.63, abs=0.04)


def test_labels_are_the_next_tokens_of_the_completion_alone() -> None:
    tokenizer = arithmetic_tokenizer()
    tokens, labels = training_tensors(iter([("1+2=", "3"), ("rev abcd=", "dcba")]))
    assert tokens.shape == labels.shape
    text = [tokenizer.decode(row[row != IGNORED]) for row in labels]
    assert text == ["3<eos>", "dcba<eos>"]
    # the first label stands at the prompt's last token, and no token of the input comes after its own label
    assert [int((row != IGNORED).nonzero()[0]) for row in labels] == [3, 8]
    for row, target in zip(tokens, labels, strict=True):
        known = target[:-1] != IGNORED
        shifted = row[1:][known]
        assert ((shifted == target[:-1][known]) | (shifted == tokenizer.pad_token_id)).all()
