"""Masked sums and means, and the four ways in which values of tokens become one loss.

Every function computes in float32 (float64 stays float64) and applies the mask with `where`, so that whatever stands
in a masked position (padding, -inf, NaN) changes neither the value nor the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core.types import LossPart, Mask, Reduction, TokenValues
from klamp.errors import ConfigError, ShapeError, check_name


class Totals(NamedTuple):
    """How many sequences and tokens a whole optimizer step has, for losses that see a part of it at a time.

    With it, `grpo_loss` divides each part by the size of the whole, so that losses and gradients of the parts, on all
    processes, add up to those of the whole batch. Counts are over all processes; tensors spare a wait for the GPU.

    Attributes:
        sequences: number of sequences in the whole batch.
        tokens: number of unmasked tokens in the whole batch.
        kl_tokens: number of tokens that carry the KL; differs from `tokens` where tokens are excluded from it.
    """

    sequences: float | Tensor
    tokens: float | Tensor
    kl_tokens: float | Tensor


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def masked(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The values in float32 or wider, with exactly 0 wherever the mask is False, even over NaN and inf.

    Raises:
        ShapeError: the mask has another shape than the values.
    """
    if x.shape != mask.shape:
        raise ShapeError(
            "the mask does not fit the values",
            got=f"values {tuple(x.shape)}, mask {tuple(mask.shape)}",
            why="each value needs to know whether it counts",
            fix="pass a boolean mask of the same shape",
        )
    x = upcast(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Sum of the unmasked values, over everything or over one dimension."""
    kept = masked(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Mean of the unmasked values; 0 (with zero gradient) where everything is masked."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def _sum_of_values(kept: Tensor, counted: Mask) -> Tensor:
    return kept.sum()


def _sum_of_sequence_means(kept: Tensor, counted: Mask) -> Tensor:
    return (kept.sum(-1) / counted.sum(-1).clamp(min=1)).sum()


_NUMERATORS: dict[Reduction, Callable[[Tensor, Mask], Tensor]] = {
    "token_mean": _sum_of_values,
    "sequence_mean": _sum_of_sequence_means,
    "sequence_sum": _sum_of_values,
    "fixed_length": _sum_of_values,
}


def natural_denominator(mask: Mask, reduction: Reduction, *, length: int | None = None) -> float | Tensor:
    """What a reduction divides by when the tensor at hand is the whole batch.

    Raises:
        ConfigError: `fixed_length` without a length.
        UnknownNameError: an unknown reduction.
    """
    check_name("reduction", reduction, get_args(Reduction))
    if reduction == "token_mean":
        return mask.sum().clamp(min=1)
    if reduction in ("sequence_mean", "sequence_sum"):
        return float(mask.shape[0])
    if length is None or length < 1:
        raise ConfigError(
            "reduction 'fixed_length' needs a length",
            got=length,
            why="it divides by sequences * length, whatever was generated",
            fix="pass length=max_completion_length",
        )
    return float(mask.shape[0] * length)


def reduce_tokens(
    x: TokenValues,
    mask: Mask,
    reduction: Reduction,
    *,
    length: int | None = None,
    denominator: float | Tensor | None = None,
    counted: Mask | None = None,
) -> Float[Tensor, ""]:
    """One number from values of tokens: the sum or one of three means.

    Equation (n_i = unmasked tokens of sequence i, B sequences, L = `length`)::

        token_mean      sum_i sum_t x_it / sum_i n_i
        sequence_mean   1/B sum_i (1/n_i sum_t x_it)
        sequence_sum    1/B sum_i sum_t x_it
        fixed_length    sum_i sum_t x_it / (B L)

    Shapes: `x`, `mask` [B, T] -> scalar. A sequence without tokens counts as 0.
    Gradient: that of the equation; masked positions get exactly 0.

    Args:
        x: per-token values.
        mask: True = counts.
        reduction: which equation.
        length: L of `fixed_length`.
        denominator: replaces the denominator by that of the whole batch, so that micro-batches add up exactly.
        counted: the tokens that n_i counts, where those are fewer than the ones that are summed.

    Raises:
        UnknownNameError: an unknown reduction.
        ConfigError: `fixed_length` without a length.
        ShapeError: mask and values differ in shape.

    Source: GRPO arXiv:2402.03300 (sequence_mean), DAPO arXiv:2503.14476 (token_mean), Dr. GRPO arXiv:2503.20783
    (fixed_length).
    """
    check_name("reduction", reduction, get_args(Reduction))
    counted = mask if counted is None else counted
    if denominator is None:
        denominator = natural_denominator(counted, reduction, length=length)
    return _NUMERATORS[reduction](masked(x, mask), counted) / denominator


def total_denominator(
    totals: Totals, reduction: Reduction, *, length: int | None = None, part: LossPart = "policy"
) -> float | Tensor:
    """The denominator of a reduction over the whole batch that `totals` describes.

    Args:
        totals: size of the whole batch.
        reduction: which reduction.
        length: L of `fixed_length`.
        part: of the loss: `policy` counts the tokens that are trained on, `kl` those that carry the KL.
    """
    if reduction == "token_mean":
        return totals.kl_tokens if part == "kl" else totals.tokens
    if reduction == "fixed_length":
        if length is None:
            raise ConfigError("reduction 'fixed_length' needs a length", fix="pass length=max_completion_length")
        return totals.sequences * length
    return totals.sequences


def suffix_sum(x: TokenValues) -> TokenValues:
    """The sum from each position to the end: y_t = sum_{j >= t} x_j."""
    return x.flip(-1).cumsum(-1).flip(-1)


def future_sum(x: TokenValues) -> TokenValues:
    """The sum over the positions after each one: y_t = sum_{j > t} x_j."""
    return suffix_sum(torch.nn.functional.pad(x, (0, 1))[..., 1:])
