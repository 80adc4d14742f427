"""The answer about the k3 formula: right by other routes, and able to fail."""

import dataclasses
import math

import pytest
import torch

from klamp.core import gradients
from klamp.core.estimators import ESTIMATORS
from klamp.verify.direction import USES, answer_direction, direction_worlds, draw, klamps_k3, reversed_form
from klamp.verify.oracle import expected, reverse_kl
from klamp.verify.worlds import random_chain


def failed(samples: int = 1_000) -> list[str]:
    return [check.claim for check in answer_direction(samples=samples).checks if not check.passed]


def test_the_reversed_formula_is_chi_squared_minus_the_kl() -> None:
    for chain in (direction_worlds()[name] for name in ("near", "far")):
        p, q = (chain.logprobs(who)[0].detach().exp() for who in ("policy", "ref"))
        chi_squared = (p**2 / q).sum() - 1
        assert expected(chain, reversed_form).item() == pytest.approx((chi_squared - reverse_kl(chain)).item())


def test_samples_agree_with_the_expectation_and_their_error_shrinks() -> None:
    chain = random_chain(0, vocab=4, length=2)
    exact = expected(chain, klamps_k3).item()
    few, many = (draw(chain, klamps_k3, samples=n, seed=1) for n in (1_000, 100_000))
    assert abs(many[0] - exact) < 5 * many[1]
    assert few[1] / many[1] == pytest.approx(10, rel=0.3)
    assert draw(chain, klamps_k3, samples=1_000, seed=1) == few
    assert draw(chain, klamps_k3, samples=1_000, seed=2) != few


def test_the_answer() -> None:
    answer = answer_direction(samples=50_000)
    assert answer.passed
    values, uses = answer.tables
    document_003 = {row[0]: row for row in values.rows}[".7 .2 .1 | .8 .1 .1"]
    by_hand = 0.7 * math.log(0.7 / 0.8) + 0.2 * math.log(2) + 0.1 * math.log(1)
    assert float(document_003[1]) == pytest.approx(by_hand, rel=1e-3)
    assert float(document_003[3]) == pytest.approx(by_hand, rel=1e-3)
    seen = {(row[0], row[1]): row for row in uses.rows}
    assert len(seen) == len(USES)
    assert seen["policy", "printed (k3)"][4:6] == ("KL(p||r)", "KL(ref||policy)")
    assert seen["policy", "reversed"][4:6] == ("-", "neither KL")
    assert seen["policy", "klamp's default"][4:] == ("KL(p||r)", "KL(policy||ref)", "1.000")
    assert seen["reference", "reversed"][4:6] == ("KL(r||p)", "KL(ref||policy)")
    assert seen["older policy", "printed (k3)"][4:6] == ("-", "neither KL")
    assert seen["older policy", "klamp, weighted"][4:6] == ("KL(p||r)", "KL(policy||ref)")
    assert any("KL(ref||policy), the other direction" in words for words in answer.words)


@pytest.mark.parametrize(
    "value", [lambda d: torch.expm1(d) - d, lambda d: -(torch.expm1(-d) + d), lambda d: torch.expm1(-d) + d + 1e-6]
)
def test_it_fails_when_k3_is_another_formula(value, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS, "k3", dataclasses.replace(ESTIMATORS["k3"], value=value))
    assert any("klamp's k3 is the printed formula" in claim for claim in failed())


def test_it_fails_when_the_samples_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("klamp.verify.direction.printed_k3", reversed_form)
    assert "far: the samples agree" in failed(20_000)


def test_it_fails_when_klamps_gradient_turns_its_sign_or_forgets_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), lambda value, log_w, delta: -delta)
    assert "tokens of the policy, klamp's default" in failed()
    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), lambda value, log_w, delta: delta)
    assert failed() == ["tokens of the older policy, klamp, weighted"]
