"""Checks of a batch before any loss is computed: one clear error instead of a NaN some steps later."""

from __future__ import annotations

import torch
from torch import Tensor

from klamp.core.types import Batch, Mask
from klamp.errors import EmptyMaskError, NonFiniteError, ShapeError

# Log-probabilities rounded in bfloat16 can end just above zero.
POSITIVE_TOLERANCE = 1e-2


def check_shape(name: str, x: Tensor, like: Tensor) -> None:
    """Refuse a tensor whose shape differs from that of the policy's log-probabilities.

    Raises:
        ShapeError: the shapes differ.
    """
    if x.shape != like.shape:
        raise ShapeError(
            f"{name} does not have the shape of policy_logprobs",
            got=f"{name} {tuple(x.shape)}, policy_logprobs {tuple(like.shape)}",
            why="all of them describe the same tokens",
            fix="score the same completions, padded to the same length",
        )


def check_mask(mask: Mask, *, part: bool = False) -> None:
    """Refuse a mask that is not boolean, or that is False everywhere (allowed for a part of a batch).

    Raises:
        ShapeError: the mask is not boolean.
        EmptyMaskError: every position is masked.
    """
    if mask.dtype != torch.bool:
        raise ShapeError(
            "the mask must be boolean", got=str(mask.dtype), why="True means: train on this token", fix="mask.bool()"
        )
    if not part and not bool(mask.any()):
        raise EmptyMaskError(
            "the mask is False everywhere",
            got=f"shape {tuple(mask.shape)}",
            why="there is no token to average over",
            fix="check that completions are not empty and that the mask marks the completion, not the prompt",
        )


def _describe(bad: Tensor, x: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0])
    return f"{int(bad.sum())} of {bad.numel()} tokens, the first at {index} with value {float(x[index])}"


def check_logprobs(name: str, logprobs: Tensor, mask: Mask) -> None:
    """Refuse values at unmasked positions that no log-probability of a sampled token can have.

    Raises:
        NonFiniteError: NaN, +inf, -inf (a token that was sampled has a probability), or a positive value.
    """
    x = logprobs.detach()
    bad = mask & ~(x.isfinite() & (x <= POSITIVE_TOLERANCE))
    if not bool(bad.any()):
        return
    raise NonFiniteError(
        f"{name} holds values that no log-probability of a sampled token can have",
        got=_describe(bad, x),
        why="NaN, infinities and positive values would spread into the loss and from there into the weights",
        fix="check the scoring pass: dtype overflow, logits masked with -inf at the sampled token, probabilities "
        "instead of log-probabilities, or a mask that covers padding",
    )


def check_batch(batch: Batch, *, part: bool = False) -> None:
    """Checks every tensor of a batch (or of a part of one) before any loss is computed.

    Raises:
        ShapeError: shapes that do not fit, or a mask that is not boolean.
        EmptyMaskError: nothing to train on.
        NonFiniteError: NaN, infinite or positive log-probabilities, or non-finite advantages.
    """
    policy = batch.policy_logprobs
    check_shape("mask", batch.mask, policy)
    check_mask(batch.mask, part=part)
    scored = batch.mask if batch.kl_weight is None else batch.mask & _check_weight(batch.kl_weight, policy)
    for name in ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
        x: Tensor | None = getattr(batch, name)
        if x is not None:
            check_shape(name, x, policy)
            check_logprobs(name, x, scored if name == "ref_logprobs" else batch.mask)
    for name in ("kl_mask", "exact_kl", "exact_kl_forward"):
        x = getattr(batch, name)
        if x is not None:
            check_shape(name, x, policy)
    _check_advantages(batch.advantages, policy, batch.mask)


def _check_weight(weight: Tensor, policy: Tensor) -> Tensor:
    """Checks `kl_weight` and says which sequences have a KL, [B, 1]."""
    if weight.shape != policy.shape[:1] or not bool(((weight >= 0) & weight.isfinite()).all()):
        raise ShapeError(
            "kl_weight must hold one finite number >= 0 per sequence",
            got=f"kl_weight {tuple(weight.shape)}, policy_logprobs {tuple(policy.shape)}",
            why="it is the factor on each sequence's KL; a negative one would reward leaving the reference",
            fix="1 / share for the sequences that the reference scored, 0 for the others",
        )
    return (weight > 0).unsqueeze(-1)


def _check_advantages(advantages: Tensor, policy: Tensor, mask: Mask) -> None:
    if advantages.shape not in (policy.shape, policy.shape[:1]):
        raise ShapeError(
            "the advantages fit neither the sequences nor the tokens",
            got=f"advantages {tuple(advantages.shape)}, policy_logprobs {tuple(policy.shape)}",
            why="an advantage belongs to a completion [B] or to a token [B, T]",
        )
    finite = advantages.isfinite() if advantages.ndim == 1 else advantages.isfinite() | ~mask
    if not bool(finite.all()):
        raise NonFiniteError(
            "an advantage is NaN or infinite",
            got=f"{int((~finite).sum())} of {finite.numel()}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )
