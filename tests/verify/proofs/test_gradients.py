"""The checks of the gradients at one position fail when a coefficient is another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.verify.proofs.broken import break_coefficient, break_estimator, failures

from klamp.verify.proofs import gradients
from klamp.verify.proofs.gradients import penalty, prove_formulas, prove_gradients
from klamp.verify.worlds import enumerate_outcomes, random_chain

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


def test_an_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, "k2", derivative=lambda delta: -delta)
    assert failures(prove_gradients) == ["k2 as a loss (its own gradient)"]


@pytest.mark.parametrize(
    ("gradient", "broken", "where"),
    [
        ("reverse", lambda value, log_w, delta: -log_w.exp() * delta, "tokens of the policy"),
        ("reverse", lambda value, log_w, delta: delta, "tokens of another sampler, weighted"),  # the weight forgotten
        ("forward", lambda value, log_w, delta: log_w.exp() * torch.expm1(-delta), "tokens of the policy"),
    ],
)
def test_a_coefficient(
    gradient: str, broken: Callable[..., object], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_coefficient(monkeypatch, ("token", gradient), broken)
    assert f"gradient {gradient}, whichever the value; {where}" in failures(prove_gradients)


@pytest.mark.parametrize(
    ("part", "broken", "claim"),
    [
        ("_k1", lambda y: 2 * (y.policy_logprobs - y.ref_logprobs), "k1 in the reward"),
        ("_k3", lambda y: (y.policy_logprobs - y.ref_logprobs) ** 2 / 2, "sg(w) k3"),
        ("_w", lambda y: torch.ones_like(y.mask, dtype=torch.float64), "w k1 differentiated"),
    ],
)
def test_a_plain_formula(part: str, broken: Callable[..., object], claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, part, broken)
    assert claim in failures(prove_formulas)


def test_the_weight_enters_off_policy_only() -> None:
    y = enumerate_outcomes(random_chain(0, length=1, sampler="other"))
    plain, weighted = (penalty("k1", "reverse", sampler=who)(y) for who in ("policy", "other"))
    ratio = (y.policy_logprobs - y.sampler_logprobs).exp()
    assert not torch.allclose(plain, weighted)
    assert torch.allclose(weighted, ratio * plain)
