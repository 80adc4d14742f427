"""Checks of a batch before any loss is computed: one clear error instead of a NaN some steps later."""

from __future__ import annotations

from torch import Tensor

from klamp.core.arguments import (
    AT_LEAST_1,
    FLOATS,
    MASKS,
    POSITIVE,
    REALS,
    check_data,
    check_instance,
    check_number,
    check_tensors,
    check_values_exist,
)
from klamp.core.masking import Totals
from klamp.core.types import Batch, Mask
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, ShapeError

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
        TensorError: the mask is not boolean.
        EmptyMaskError: every position is masked.
    """
    check_tensors(MASKS, mask=mask)
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
        NonFiniteError: NaN, +inf, or -inf (a token that was sampled has a probability).
        DataError: a value above 0: a probability above 1.
    """
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
            fix="check the scoring pass: dtype overflow, logits masked with -inf at the sampled token, or a mask that "
            "covers padding",
        )
    raise DataError(
        f"{name} holds log-probabilities above 0",
        got=_describe(bad, x),
        why="the logarithm of a probability is never above 0, so these are something else",
        fix="pass log-probabilities (log_softmax, taken at the sampled token), not probabilities, logits or negative "
        "log-likelihoods",
    )


def check_batch(batch: Batch, *, part: bool = False) -> None:
    """Checks every tensor of a batch (or of a part of one) before any loss is computed.

    Raises:
        TensorError: no tensor, another data type, another device, or a gradient where there must be none.
        ShapeError: shapes that do not fit.
        EmptyMaskError: nothing to train on.
        NonFiniteError: NaN or infinite log-probabilities or advantages.
        DataError: log-probabilities above 0.
    """
    _check_kinds(batch)
    policy = batch.policy_logprobs
    if policy.ndim != 2 or policy.numel() == 0:
        raise ShapeError(
            "policy_logprobs must have the shape [B, T], with at least one token",
            got=str(tuple(policy.shape)),
            why="a loss is averaged over sequences and their tokens",
            fix="policy_logprobs[None] for a single sequence" if policy.ndim == 1 else "leave empty batches out",
        )
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
    for name in ("gate_kl", "reference_length"):
        _check_per_sequence(name, getattr(batch, name), policy)
    _check_advantages(batch.advantages, policy, batch.mask)


def _check_per_sequence(name: str, x: object, policy: Tensor) -> None:
    if isinstance(x, Tensor) and x.shape != policy.shape[:1] and x.ndim:
        raise ShapeError(
            f"{name} does not have one number per sequence",
            got=f"{name} {tuple(x.shape)}, policy_logprobs {tuple(policy.shape)}",
            why="it says something about each completion as a whole",
            fix=f"pass {name} as [B]",
        )


def check_totals(totals: Totals) -> None:
    """Refuse the size of a whole batch that is none; numbers on a device are not looked at.

    Raises:
        ConfigError: no `Totals`, or a number in it that is not positive.
    """
    check_instance("totals", totals, Totals, fix="Totals(sequences=..., tokens=..., kl_tokens=...)")
    for name, x in totals._asdict().items():
        if not isinstance(x, Tensor):
            check_number(f"totals.{name}", x, POSITIVE.but("a loss is divided by it", "count the whole batch"))


def _given(batch: Batch, *names: str) -> dict[str, Tensor]:
    """The tensors of a batch that are there."""
    return {name: x for name in names if (x := getattr(batch, name)) is not None}


def _check_kinds(batch: Batch) -> None:
    """By type, data type and device alone."""
    policy = batch.policy_logprobs
    check_tensors(FLOATS, policy_logprobs=policy)
    check_values_exist("policy_logprobs", policy)
    names = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "exact_kl", "exact_kl_forward", "kl_weight", "gate_kl")
    check_tensors(FLOATS, like=policy, **_given(batch, *names))
    check_tensors(MASKS, like=policy, mask=batch.mask, **_given(batch, "kl_mask"))
    check_tensors(REALS, like=policy, advantages=batch.advantages)
    check_data(advantages=batch.advantages, kl_weight=batch.kl_weight, gate_kl=batch.gate_kl)
    check_number("group_size", batch.group_size, AT_LEAST_1, whole=True, optional=True)
    if isinstance(batch.reference_length, Tensor):
        check_tensors(REALS, reference_length=batch.reference_length)  # moved to the others' device where it is used
    else:
        check_number("reference_length", batch.reference_length, POSITIVE, optional=True)


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
            fix="pass one advantage per completion, or one per token padded as the log-probabilities are",
        )
    finite = advantages.isfinite() if advantages.ndim == 1 else advantages.isfinite() | ~mask
    if not bool(finite.all()):
        raise NonFiniteError(
            "an advantage is NaN or infinite",
            got=f"{int((~finite).sum())} of {finite.numel()}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )
