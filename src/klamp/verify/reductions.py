"""Finds out how a trainer averages its per-token KL: which weight each token has in the loss of a batch.

The batch is ragged and padded: completions of 1 and 3 tokens in 5 columns. Only one token at a time is away from the
reference, so that the loss is that token's KL times its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

BatchLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(policy_logprobs, ref_logprobs, mask), each [B, T] -> the KL part of the batch's loss, coefficient 1."""

LENGTHS, COLUMNS = (1, 3), 5
LOG_RATIO = 0.5
"""The log-ratio of the one token that is away from the reference, in nats."""
TOLERANCE = 1e-4

_ROWS, _TOKENS = len(LENGTHS), sum(LENGTHS)
EVEN = {
    1 / _TOKENS: "mean over the tokens of the batch",
    1 / _ROWS: "sum over each completion, mean over completions",
    1.0: "sum over the tokens of the batch",
}
"""The weights of tokens -> the averaging in words."""


def name_reduction(loss: BatchLoss, one_token: float) -> str:
    """Says in words how a trainer's loss weighs its tokens; an exception of the trainer is quoted.

    Args:
        loss: the KL part of the loss of a batch.
        one_token: the KL of one token at a log-ratio of `LOG_RATIO`, by the same host.
    """
    try:
        weights, padding = token_weights(loss, one_token)
    except Exception as error:  # an option that the host does not have
        return f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return _name_weights(weights) + (", padding included" if any(abs(weight) > TOLERANCE for weight in padding) else "")


def token_weights(loss: BatchLoss, one_token: float) -> tuple[list[float], list[float]]:
    """The weights of the first completion's only token and of the second one's three, and those of padding."""
    mask = torch.arange(COLUMNS) < torch.tensor(LENGTHS)[:, None]
    kept, padding = (
        [_loss_at(loss, mask, (row, column)) / one_token for row, column in where.nonzero().tolist()]
        for where in (mask, ~mask)
    )
    return kept, padding


def _loss_at(loss: BatchLoss, mask: Tensor, place: tuple[int, int]) -> float:
    policy = torch.full(mask.shape, -1.0, dtype=torch.float64)
    ref = policy.clone()
    ref[place] -= LOG_RATIO
    return loss(policy.requires_grad_(), ref, mask).item()


def _name_weights(weights: list[float]) -> str:
    first, *rest = weights
    if all(_near(weight, first) for weight in rest):
        return _name_even(first)
    if _near(first, 1 / _ROWS) and all(_near(3 * weight, first) for weight in rest):
        return "mean over each completion, mean over completions"
    if all(_near(weight, 3 * first) for weight in rest):
        return f"sum over tokens, each times its completion's length / (completions x {_divisor(first)})"
    return "weights of the tokens: " + ", ".join(f"{weight:.3g}" for weight in weights)


def _name_even(weight: float) -> str:
    for known, words in EVEN.items():
        if _near(weight, known):
            return words
    return f"sum over tokens / (completions x {_divisor(weight)})"


def _divisor(weight: float) -> str:
    divisor = 1 / (weight * _ROWS)
    return "padded length" if _near(divisor, COLUMNS) else f"{divisor:.4g}"


def _near(a: float, b: float) -> bool:
    return abs(a - b) < TOLERANCE * abs(b)
