"""Masked sums and means, the four ways in which values of tokens become one loss, and a sample of the sequences.

Every function computes in float32 (float64 stays float64) and applies the mask with `where`, so that whatever stands
in a masked position (padding, -inf, NaN) changes neither the value nor the gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from klamp.core.arguments import (
    POSITIVE,
    check_instance,
    check_number,
    check_values_exist,
    describe,
)
from klamp.core.types import Batch, LossPart, Mask, Reduction, Scored, TokenValues, argument_of
from klamp.errors import ConfigError, DataError, EmptyMaskError, NonFiniteError, ShapeError, check_name


class Totals(NamedTuple):
    """How many sequences and tokens a whole optimizer step has, for losses that see a part of it at a time.

    With it, `grpo_loss` divides each part by the size of the whole, so that losses and gradients of the parts, on all
    processes, add up to those of the whole batch. Counts are over all processes; tensors spare a wait for the GPU.
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


def natural_denominator(mask: Mask, reduction: Reduction, *, length: int | None = None) -> float | Tensor:
    """What a reduction divides by when the tensor at hand is the whole batch; see `total_denominator`."""
    tokens = mask.sum().clamp(min=1)
    totals = Totals(sequences=float(mask.shape[0]), tokens=tokens, kl_tokens=tokens)
    return total_denominator(totals, reduction, length=length)


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
        x, mask: values of tokens; True = counts.
        reduction, length: which equation; L of `fixed_length`.
        denominator: replaces the denominator by that of the whole batch, so that micro-batches add up exactly.
        counted: the tokens that n_i counts, where those are fewer than the ones that are summed.

    Source: GRPO arXiv:2402.03300 (sequence_mean), DAPO arXiv:2503.14476 (token_mean), Dr. GRPO arXiv:2503.20783
    (fixed_length).
    """
    check_name("reduction", reduction, get_args(Reduction))
    counted = mask if counted is None else counted
    if denominator is None:
        denominator = natural_denominator(counted, reduction, length=length)
    kept = masked(x, mask)
    if reduction == "sequence_mean":
        kept = kept.sum(-1) / counted.sum(-1).clamp(min=1)
    return kept.sum() / denominator


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
            why="it divides by sequences * length, whatever was generated",
            fix="pass length=max_completion_length",
        )
    return totals.sequences * length


def future_sum(x: TokenValues) -> TokenValues:
    """The sum over the positions after each one: y_t = sum_{j > t} x_j."""
    return torch.nn.functional.pad(x, (0, 1))[..., 1:].flip(-1).cumsum(-1).flip(-1)


# Log-probabilities rounded in bfloat16 can end just above zero.
POSITIVE_TOLERANCE = 1e-2


def _describe(bad: Tensor, x: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"{int(bad.sum())} of {bad.numel()} tokens, the first at {index} with value {float(x[index])}"


SCORING = "check the scoring pass: dtype overflow, logits masked with -inf at the sampled token, or a mask over padding"
BOUND_IT = f"{SCORING}; if the model rules out what was sampled, teacher_max_log_ratio bounds its pull, and counts it"


def check_logprobs(name: str, logprobs: Tensor, mask: Mask, *, fix: str = SCORING) -> None:
    """Refuse values at unmasked positions that no log-probability of a sampled token can have."""
    x = logprobs.detach()
    finite = x.isfinite()
    bad = mask & ~(finite & (x <= POSITIVE_TOLERANCE))
    if not bool(bad.any()):
        return
    lost = mask & ~finite
    if bool(lost.any()):
        raise NonFiniteError(
            f"{name} holds values that no log-probability of a sampled token can have",
            got=_describe(lost, x),
            why="NaN and infinities would spread into the loss and from there into the weights",
            fix=fix,
        )
    raise DataError(
        f"{name} holds log-probabilities above 0",
        got=_describe(bad, x),
        why="the logarithm of a probability is never above 0, so these are something else",
        fix="pass log-probabilities (log_softmax, taken at the sampled token), not probabilities, logits or negative "
        "log-likelihoods",
    )


def check_batch(batch: Batch, *, part: bool = False, bounded: Collection[str] = ()) -> None:
    """Check the values of a batch before any loss is computed; its shapes it checked itself.

    Args:
        batch: scored completions.
        part: whether it is a part of one, which may have no tokens to train on.
        bounded: anchors whose log-ratio is bounded, so that a token may have no probability under them.

    Raises:
        TensorError: tensors without values (on the meta device).
        ShapeError, EmptyMaskError: a batch without tokens, or without one to train on.
        NonFiniteError: NaN or infinite log-probabilities or advantages.
        DataError: log-probabilities above 0, or a weight of an anchor that is negative or not finite.
    """
    check_values_exist("policy_logprobs", batch.policy_logprobs)
    if batch.mask.numel() == 0:
        raise ShapeError(
            "the batch has no tokens",
            got=f"policy_logprobs {tuple(batch.mask.shape)}",
            why="there is nothing to average over",
            fix="leave empty batches out",
        )
    if not part and not bool(batch.mask.any()):
        raise EmptyMaskError(
            "the mask is False everywhere",
            got=f"shape {tuple(batch.mask.shape)}",
            why="there is no token to average over",
            fix="check that completions are not empty and that the mask marks the completion, not the prompt",
        )
    check_logprobs("policy_logprobs", batch.policy_logprobs, batch.mask)
    if batch.old_logprobs is not None:
        check_logprobs("old_logprobs", batch.old_logprobs, batch.mask)
    for anchor, scored in batch.anchors.items():
        _check_anchor(anchor, scored, batch.mask, bounded=anchor in bounded)
    _check_advantages(batch.advantages, batch.mask)


def _check_anchor(anchor: str, scored: Scored, mask: Mask, *, bounded: bool) -> None:
    counted = mask if scored.mask is None else mask & scored.mask
    counted = counted & ~scored.logprobs.isneginf() if bounded else counted
    check_logprobs(argument_of(anchor), scored.logprobs, counted, fix=BOUND_IT)
    if scored.weight is not None and not bool(((scored.weight >= 0) & scored.weight.isfinite()).all()):
        raise DataError(
            "the weights of an anchor must be one finite number >= 0 per sequence",
            got=f"anchors[{anchor!r}].weight={describe(scored.weight)}",
            why="it is the factor on each sequence's KL; a negative one would reward leaving the anchor",
            fix="leave weight out",
        )


def check_totals(totals: Totals) -> None:
    """Refuse the size of a whole batch that is not positive; numbers on a device are not looked at."""
    check_instance("totals", totals, Totals, fix="Totals(sequences=..., tokens=..., kl_tokens=...)")
    for name, x in totals._asdict().items():
        if not isinstance(x, Tensor):
            check_number(f"totals.{name}", x, POSITIVE.but("a loss is divided by it", "count the whole batch"))


def _check_advantages(advantages: Tensor, mask: Mask) -> None:
    finite = advantages.isfinite() if advantages.ndim == 1 else advantages.isfinite() | ~mask
    if not bool(finite.all()):
        raise NonFiniteError(
            "an advantage is NaN or infinite",
            got=f"{int((~finite).sum())} of {finite.numel()}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )
