"""Naming a gradient: the first truth of which it is one common multiple, or none."""

from __future__ import annotations

import pytest
import torch

from klamp.verify.oracle import NOTHING_KNOWN, Followed, cosine, name_gradient, share, truths
from klamp.verify.worlds import random_chain

CHAINS = [random_chain(seed, vocab=4, length=1, eos=None) for seed in range(2)]
KNOWN = [truths(chain) for chain in CHAINS]


def scaled(name: str, *factors: float) -> list[torch.Tensor]:
    return [factor * known[name] for factor, known in zip(factors, KNOWN, strict=True)]


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.04])
@pytest.mark.parametrize("name", ["reverse", "forward"])
def test_a_multiple_is_named_with_its_factor(name: str, factor: float) -> None:
    found = name_gradient(scaled(name, factor, factor), KNOWN)
    assert found.name == name
    assert found.factor == pytest.approx(factor, abs=1e-14)


def test_a_factor_that_differs_between_worlds_is_no_multiple() -> None:
    assert name_gradient(scaled("reverse", 1.0, 1.01), KNOWN).name == NOTHING_KNOWN


def test_zero_is_measured_against_the_reverse_gradient() -> None:
    assert name_gradient(scaled("reverse", 1e-9, 1e-9), KNOWN) == Followed("zero", 0.0)
    assert name_gradient(scaled("reverse", 1e-5, 1e-5), KNOWN).name == "reverse"


def test_the_tolerance_decides_what_is_the_same() -> None:
    near = [known["forward"] + 1e-6 * known["reverse"] for known in KNOWN]
    assert name_gradient(near, KNOWN).name == NOTHING_KNOWN
    assert name_gradient(near, KNOWN, tolerance=1e-5).name == "forward"


@pytest.mark.parametrize(
    ("followed", "words"),
    [
        (Followed("reverse", 1.0), "KL(policy||ref)"),
        (Followed("forward", -1.0), "minus KL(ref||policy)"),
        (Followed("reverse", 0.25), "0.25 x KL(policy||ref)"),
        (Followed("zero", 0.0), "zero"),
        (Followed(NOTHING_KNOWN, 0.0), "neither KL"),
        (Followed("L1 distance", 1.0), "L1 distance"),
    ],
)
def test_in_words(followed: Followed, words: str) -> None:
    assert followed.in_words == words


def test_a_turned_sign_is_not_the_same() -> None:
    assert Followed("reverse", 1.0).is_exactly("reverse")
    assert not Followed("reverse", -1.0).is_exactly("reverse")
    assert Followed("reverse", -1.0).is_exactly("reverse", factor=-1.0)
    assert not Followed("forward", 1.0).is_exactly("reverse")
    assert Followed("zero", 0.0).is_exactly("zero")
    assert Followed(NOTHING_KNOWN, 0.0).is_exactly(NOTHING_KNOWN)
    assert not Followed("zero", 0.0).is_exactly(NOTHING_KNOWN)


def test_cosine_and_share() -> None:
    a, b = [torch.tensor([2.0, 0.0])], [torch.tensor([1.0, 1.0])]
    assert cosine(a, b) == pytest.approx(0.5**0.5)
    assert share(a, b) == pytest.approx(1.0)
    assert share(b, a) == pytest.approx(0.5)
    assert cosine(a, [torch.zeros(2)]) == 0.0
