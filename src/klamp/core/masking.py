"""Masked sums and means, the four ways in which values of tokens become one loss, and a sample of the sequences.

Every function computes in float32 (float64 stays float64) and applies the mask with `where`, so that no number
in a masked position (padding, -inf, NaN) changes the value or the gradient.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core.arguments import POSITIVE, check_instance, check_number
from klamp.core.types import LogProbs, LossPart, Mask, Reduction, TokenValues
from klamp.errors import ConfigError, ShapeError, check_name


class Totals(NamedTuple):
    """How many sequences and tokens a whole optimizer step has, for losses that see a part of it at a time.

    With it, `grpo_loss` divides each part by the size of the whole, so that losses and gradients of the parts, on all
    processes, add up to the whole batch's. Counts are over all processes; tensors spare a wait for the GPU.
    """

    sequences: float | Tensor
    tokens: float | Tensor
    """Those that are trained on."""
    kl_tokens: float | Tensor
    """Those that carry the KL, where some are excluded from it."""


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def masked(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The values in float32 or wider, with exactly 0 wherever the mask is False, even over NaN and inf."""
    if x.shape != mask.shape:
        raise ShapeError(
            "the mask does not fit the values",
            got=f"values {tuple(x.shape)}, mask {tuple(mask.shape)}",
            why="the mask says whether each value counts",
            fix="pass one log-probability per token (not logits), and a mask of the same shape",
        )
    x = upcast(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Sum of the unmasked values, over everything or over one dimension."""
    x = masked(x, mask)
    return x.sum() if dim is None else x.sum(dim)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None) -> Tensor:
    """Mean of the unmasked values; 0 (with zero gradient) where everything is masked."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def share_of(marked: Bool[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Tensor:
    """The share of the unmasked tokens that are marked, in [0, 1]; 0 where all are masked."""
    return (marked & mask).sum() / mask.sum().clamp(min=1)


def repeated_share(
    policy: Float[Tensor, "*shape"], scores: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Tensor:
    """The share of an anchor's log-probabilities that repeat the one before, where the policy's differ."""
    own, others = policy.detach()[mask], scores[mask]
    return share_of(others[1:] == others[:-1], own.diff() != 0)


def log_ratio(policy_logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]) -> Tensor:
    """The log-ratio delta = log policy - log ref in nats, formed in float32 or wider."""
    if policy_logprobs.shape != ref_logprobs.shape:
        raise ShapeError(
            "policy and reference log-probabilities differ in shape",
            got=f"policy {tuple(policy_logprobs.shape)}, ref {tuple(ref_logprobs.shape)}",
            why="the log-ratio is taken token by token",
            fix="score the same tokens with both models",
        )
    return upcast(policy_logprobs) - upcast(ref_logprobs)


def masked_log_ratio(policy_logprobs: LogProbs, ref_logprobs: LogProbs, mask: Mask) -> TokenValues:
    """The log-ratio delta = log policy - log ref in nats, detached; 0 where masked."""
    return masked(log_ratio(policy_logprobs.detach(), ref_logprobs.detach()), mask)


def bounded(delta: TokenValues, bound: float | None) -> TokenValues:
    """A log-ratio within a bound: value and size of the coefficient are limited, the gradient is never set to zero."""
    return delta if bound is None else delta.clamp(-bound, bound)


def totals_of(counted: Mask) -> Totals:
    """The size of a tensor that is the whole batch, by the tokens that count."""
    tokens = counted.sum().clamp(min=1)
    return Totals(sequences=float(counted.shape[0]), tokens=tokens, kl_tokens=tokens)


def reduce_tokens(
    x: TokenValues,
    mask: Mask,
    reduction: Reduction,
    *,
    length: int | None = None,
    totals: Totals | None = None,
    carried: Mask | None = None,
) -> Float[Tensor, ""]:
    """One number from values of tokens: the sum or one of three means.

    Equation (n_i = unmasked tokens of sequence i, B sequences, L = `length`)::

        token_mean      sum_i sum_t x_it / sum_i n_i
        sequence_mean   1/B sum_i (1/n_i sum_t x_it)
        sequence_sum    1/B sum_i sum_t x_it
        fixed_length    sum_i sum_t x_it / (B L)

    Shapes: `x`, `mask` [B, T] -> scalar. A sequence without tokens counts as 0.

    Args:
        totals: the size of the whole batch, of which this is a micro-batch, so that micro-batches add up exactly.
        carried: the tokens with the KL, which n_i counts; None: all in `mask`.

    Source: GRPO arXiv:2402.03300 (sequence_mean), DAPO arXiv:2503.14476 (token_mean), Dr. GRPO arXiv:2503.20783
    (fixed_length).
    """
    counted, part = (mask, "policy") if carried is None else (carried, "kl")
    totals = totals_of(counted) if totals is None else totals
    denominator, sums = total_denominator(totals, reduction, length=length, part=part), masked(x, mask)
    if reduction == "sequence_mean":
        sums = sums.sum(-1) / counted.sum(-1).clamp(min=1)
    return sums.sum() / denominator


def total_denominator(
    totals: Totals, reduction: Reduction, *, length: int | None = None, part: LossPart = "policy"
) -> float | Tensor:
    """The denominator of a reduction over the whole batch; part `kl` counts only the tokens that carry the KL."""
    check_name("reduction", reduction, get_args(Reduction))
    if reduction == "token_mean":
        return totals.kl_tokens if part == "kl" else totals.tokens
    if reduction != "fixed_length":
        return totals.sequences
    if length is None or length < 1:
        raise ConfigError(
            "reduction 'fixed_length' needs a length",
            got=length,
            why="it divides by sequences * length, at any generated length",
            fix="pass length=max_completion_length",
        )
    return totals.sequences * length


def future_sum(x: TokenValues) -> TokenValues:
    """The sum over the positions after each one: y_t = sum_{j > t} x_j."""
    return torch.nn.functional.pad(x, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)


def check_totals(totals: Totals) -> None:
    """Refuse the size of a whole batch that is not positive; numbers on a device are not looked at."""
    check_instance("totals", totals, Totals, fix="Totals(sequences=..., tokens=..., kl_tokens=...)")
    for name, x in totals._asdict().items():
        if not isinstance(x, Tensor):
            check_number(f"totals.{name}", x, POSITIVE.but("a loss is divided by it", "count the whole batch"))
