"""The checks over whole completions fail when later tokens are forgotten, or a weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.verify.proofs.broken import break_coefficient, failures

from klamp.core.estimators import DIRECTIONS
from klamp.verify.proofs import gradients
from klamp.verify.proofs.gradients import prove_sequence_formulas, prove_sequences

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes


@pytest.mark.parametrize(
    ("gradient", "broken", "claim"),
    [
        ("reverse", lambda value, log_w, delta: log_w.exp() * delta, "horizon sequence, value k3"),
        ("forward", lambda value, log_w, delta: -torch.expm1(-delta), "horizon sequence, gradient forward"),
    ],
)
def test_a_coefficient_that_sees_its_own_token_only(
    gradient: str, broken: Callable[..., object], claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_coefficient(monkeypatch, ("sequence", gradient), broken)
    assert claim in failures(prove_sequences)


def test_the_exact_kl_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIRECTIONS, "reverse", DIRECTIONS["forward"])
    assert {"horizon token, exact", "horizon sequence, exact"} <= set(failures(prove_sequences))


def test_weights_of_single_tokens_instead_of_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_tokens(policy, behavior, mask, *, horizon, max_weight=None):
        return torch.zeros_like(policy) if behavior is None else (policy - behavior).detach()

    monkeypatch.setattr(gradients, "log_weights", of_tokens)
    assert failures(prove_sequences) == ["off-policy, prefix ratio, exact"]


@pytest.mark.parametrize(
    ("part", "broken", "claim"),
    [
        ("_to_go", lambda x: x, "k1 reward-to-go (FRPO)"),
        ("_prefix_ratio", gradients._w, "prefix-product ratio times k3, differentiated"),
        ("_mean_ratio", gradients._prefix_ratio, "geometric-mean ratio times k3 (GSPO's)"),
    ],
)
def test_a_plain_formula(part: str, broken: Callable[..., object], claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, part, broken)
    assert claim in failures(prove_sequence_formulas)
