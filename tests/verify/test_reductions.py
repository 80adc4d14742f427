"""How a batch loss weighs its tokens: every normaliser that trainers use, told apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from klamp.audit.examine import COLUMNS, LENGTHS, LOG_RATIO, name_reduction, token_weights


def k2(policy: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, (policy - ref).square() / 2, 0.0)


ONE = LOG_RATIO**2 / 2
REDUCTIONS = {
    "mean over the tokens of the batch": lambda x, m: x.sum() / m.sum(),
    "sum over the tokens of the batch": lambda x, m: x.sum(),
    "mean over each completion, mean over completions": lambda x, m: (x.sum(-1) / m.sum(-1)).mean(),
    "sum over each completion, mean over completions": lambda x, m: x.sum(-1).mean(),
    "sum over tokens / (completions x padded length)": lambda x, m: x.mean(),
    "sum over tokens / (completions x 256)": lambda x, m: x.sum() / (len(x) * 256),
    "sum over tokens, each times its completion's length / (completions x padded length)": lambda x, m: (
        x * m.sum(-1, keepdim=True)
    ).mean(),
}


@pytest.mark.parametrize("words", REDUCTIONS)
def test_each_normaliser_has_its_words(words: str) -> None:
    assert name_reduction(lambda p, ref, mask: REDUCTIONS[words](k2(p, ref, mask), mask), ONE) == words


def test_weights_of_a_normaliser_without_words_are_listed() -> None:
    def loss(policy: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        return (k2(policy, ref, mask) * torch.arange(1, COLUMNS + 1)).sum()

    assert token_weights(loss, ONE) == (pytest.approx([1, 1, 2, 3]), pytest.approx([0] * (2 * COLUMNS - sum(LENGTHS))))
    assert name_reduction(loss, ONE) == "weights of the tokens: 1, 1, 2, 3"


def test_padding_that_counts_is_told() -> None:
    def loss(policy: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        return k2(policy, ref, torch.ones_like(mask)).sum()

    assert name_reduction(loss, ONE) == "sum over the tokens of the batch, padding included"


def test_what_the_host_raises_is_quoted() -> None:
    def loss(policy: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        raise ValueError("Unknown loss type: luspo\nmore")

    assert name_reduction(loss, ONE) == "raises ValueError: Unknown loss type: luspo"
