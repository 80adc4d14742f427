"""The checks of the values fail when an estimator is another one than it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.verify.proofs.broken import break_estimator, failures

from klamp.core.estimators import DIRECTIONS
from klamp.verify.proofs.values import estimate, prove_gaussians, prove_values
from klamp.verify.worlds import enumerate_outcomes, random_chain

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


def test_k3_with_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, "k3", value=lambda delta: -(torch.expm1(-delta) + delta))
    assert {"E[k3] - KL(policy||ref)", "k3 is never negative"} <= set(failures(prove_values))
    assert "Gaussians 1 apart: E[k3] = m^2/2" in failures(prove_gaussians)


def test_k3_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(policy - ref) instead of exp(ref - policy): the k3 bug report's first thought."""
    break_estimator(monkeypatch, "k3", value=lambda delta: torch.expm1(delta) - delta)
    found = failures(prove_values)
    assert "E[k3] - KL(policy||ref)" in found
    assert "top-p sampling: k3 is low by the reference's lost mass" in found


@pytest.mark.parametrize(
    ("name", "value", "claim"),
    [
        ("k1", lambda d: -d, "E[k1] - KL(policy||ref)"),
        ("k2", lambda d: d**2, "k2's bias is of third order: at half the distance 1/8"),
        ("abs", lambda d: d.abs() / 2, "abs over-estimates"),
    ],
)
def test_other_values(name: str, value: Callable[..., object], claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, name, value=value)
    assert claim in failures(prove_values)


def test_the_exact_kl_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIRECTIONS, "reverse", DIRECTIONS["forward"])
    assert "exact at one position - KL(policy||ref)" in failures(prove_values)


def test_an_estimator_of_half_the_noise_is_not_that_of_the_gaussians(monkeypatch: pytest.MonkeyPatch) -> None:
    break_estimator(monkeypatch, "k1", value=lambda delta: delta / 2)
    assert {"Gaussians 1 apart: E[k1] = m^2/2", "Gaussians 1 apart: Var k1 = m^2"} <= set(failures(prove_gaussians))


def test_the_loss_is_klamps_own_estimator() -> None:
    y = enumerate_outcomes(random_chain(0))
    delta = y.policy_logprobs - y.ref_logprobs
    assert torch.allclose(estimate("k2")(y), delta**2 / 2)
