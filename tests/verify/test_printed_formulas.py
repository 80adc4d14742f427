"""Printed formulas: what is measured of each, and the sentences that follow from it and change with it."""

import functools
import math

import pytest
import torch

from klamp.errors import UnknownNameError
from klamp.verify.judge import FORMS, Explanation, explain_form, judge_value
from klamp.verify.oracle import expected_pull, in_reward
from klamp.verify.worlds import random_positions

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@pytest.mark.parametrize("name", [name for name in FORMS if name != "exact-kl"])
def test_the_formula_is_the_printed_one(name: str) -> None:
    """Written a second time, from where it is printed, on plain numbers."""
    policy, ref = torch.tensor([[-0.5, -2.0]], dtype=torch.float64), torch.tensor([[-1.5, -0.25]], dtype=torch.float64)
    printed = {
        "k1-as-loss": lambda p, r: p - r,
        "minus-k1": lambda p, r: r - p,
        "ratio-weighted": lambda p, r: math.exp(p - r) * (p - r),
        "k3-as-loss": lambda p, r: math.exp(r - p) - (r - p) - 1,
    }[name]
    by_hand = [printed(p, r) for p, r in zip(policy[0].tolist(), ref[0].tolist(), strict=True)]
    assert FORMS[name].function(policy, ref)[0].tolist() == pytest.approx(by_hand, abs=1e-14)


@pytest.mark.parametrize(
    ("name", "estimates", "follows", "factor"),
    [
        ("k1-as-loss", "KL(policy||ref)", "zero", 0.0),
        ("minus-k1", "minus KL(policy||ref)", "zero", 0.0),
        ("ratio-weighted", "neither KL", "none of these", 0.0),
        ("exact-kl", "KL(policy||ref)", "reverse", 1.0),
        ("k3-as-loss", "KL(policy||ref)", "forward", 1.0),
    ],
)
def test_what_each_estimates_and_whose_gradient_it_follows(
    name: str, estimates: str, follows: str, factor: float
) -> None:
    form, positions = FORMS[name], random_positions(3)
    assert judge_value(form.value, positions).estimates == estimates
    loss = in_reward(form.value) if form.use == "reward" else form.value
    assert expected_pull(positions, loss).follows == (follows, pytest.approx(factor))


@functools.cache
def explained(name: str) -> Explanation:
    return explain_form(name)


VERDICTS = [
    ("k1-as-loss", "the expected gradient is zero, so it regularises nothing"),
    ("minus-k1", "the sign is wrong, a reward for leaving the reference"),
    ("ratio-weighted", "for tokens of the policy it is not KL(policy||ref)"),
    ("exact-kl", "the value is right; it follows the gradient of KL(policy||ref)"),
    ("k3-as-loss", "it follows the gradient of KL(ref||policy)"),
]


@pytest.mark.parametrize(("name", "words"), VERDICTS)
def test_the_verdict_follows_from_the_numbers(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in explained(name).verdict
    other = "k3-as-loss" if name != "k3-as-loss" else "k1-as-loss"
    swapped = FORMS[name]._replace(function=FORMS[other].function, use=FORMS[other].use)
    monkeypatch.setattr("klamp.verify.judge.FORMS", {name: swapped})
    assert words not in explain_form(name).verdict


def test_the_numbers_of_the_lines() -> None:
    value = dict(explained("ratio-weighted").lines)["value"]
    assert value == "+9.3731 nats per token where KL(policy||ref) is +0.8851"
    assert ("", "with tokens of the reference +0.8851") in explained("ratio-weighted").lines
    assert "cosine 0.510 to 0.996 with KL(policy||ref)" in dict(explained("exact-kl").lines)["sequence"]
    assert "float16" in dict(explained("k3-as-loss").lines)["at 30 nats"]
    assert [name for name in FORMS if "at 30 nats" in dict(explained(name).lines)] == ["ratio-weighted", "k3-as-loss"]


def test_another_name_is_refused() -> None:
    assert set(FORMS) == {name for name, _ in VERDICTS}
    with pytest.raises(UnknownNameError, match="did you mean 'minus-k1"):
        explain_form("minus-k2")
