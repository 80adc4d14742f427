"""Rows of a real model: exact sums over the vocabulary, whatever its size and type."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from klamp.core.estimators import ESTIMATORS
from klamp.errors import ShapeError
from klamp.verify.answers import verify_logits

NAMES = ("the policy", "the reference")


def rows(vocab: int = 40, prefixes: int = 12, spread: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    policy = 2 * torch.randn(prefixes, vocab, generator=generator)
    ref = policy + spread * torch.randn(prefixes, vocab, generator=generator)
    tokens = torch.multinomial(policy.softmax(-1), 1, generator=generator)[:, 0]
    return policy, ref, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_claims_hold_on_rows_of_any_type(dtype: torch.dtype) -> None:
    policy, ref, tokens = rows()
    answer = verify_logits(policy.to(dtype), ref.to(dtype), tokens, names=NAMES)
    assert [check.claim for check in answer.checks if not check.passed] == []
    values, gradients = answer.tables
    assert {row[0]: row[2] for row in values.rows}["k1"] == "unbiased"
    assert {row[0]: row[2] for row in values.rows}["k3"] == "unbiased"
    assert {row[0]: row[1] for row in gradients.rows}["k3, gradient own"] == "KL(ref||policy)"


def test_a_large_vocabulary_is_no_matter() -> None:
    policy, ref, tokens = rows(vocab=30_000, prefixes=3)
    assert verify_logits(policy, ref, tokens, names=NAMES).passed


def test_the_sampled_column_is_the_mean_over_the_drawn_tokens() -> None:
    policy, ref, tokens = rows()
    answer = verify_logits(policy, ref, tokens, names=NAMES)
    delta = (policy.log_softmax(-1) - ref.log_softmax(-1)).gather(-1, tokens[:, None])
    assert float(answer.tables[0].rows[0][3].split()[0]) == pytest.approx(delta.mean().item(), rel=1e-2)


def test_tokens_that_neither_model_allows_count_for_nothing() -> None:
    policy, ref, tokens = rows()
    forbidden = torch.full((len(policy), 5), -torch.inf)
    padded = verify_logits(torch.cat([policy, forbidden], 1), torch.cat([ref, forbidden], 1), tokens, names=NAMES)
    assert padded.passed
    assert padded.tables[0].rows == verify_logits(policy, ref, tokens, names=NAMES).tables[0].rows


def test_two_equal_models_are_called_equal() -> None:
    policy, _, tokens = rows()
    failed = [check.claim for check in verify_logits(policy, policy, tokens, names=NAMES).checks if not check.passed]
    assert "the two models differ" in failed


def test_a_broken_k3_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: torch.expm1(delta) - delta)
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    failed = [check.claim for check in verify_logits(*rows(), names=NAMES).checks if not check.passed]
    assert failed == ["k3 is unbiased (relative)"]


def test_a_broken_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import klamp.core.gradients as gradients

    monkeypatch.setitem(gradients.COEFFICIENTS, ("token", "reverse"), lambda value, log_w, delta: -delta)
    failed = [check.claim for check in verify_logits(*rows(), names=NAMES).checks if not check.passed]
    assert failed == ["k3, gradient reverse as a loss"]


def test_rows_that_do_not_belong_together() -> None:
    policy, ref, tokens = rows()
    with pytest.raises(ShapeError, match="same tokenizer"):
        verify_logits(policy, ref[:, :-1], tokens, names=NAMES)
    with pytest.raises(ShapeError, match="belong together"):
        verify_logits(policy, ref, tokens[:-1], names=NAMES)
