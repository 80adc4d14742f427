"""Checks of a batch before any loss is computed: one clear error instead of a NaN some steps later."""

from __future__ import annotations

from torch import Tensor

from klamp.core.arguments import MASKS, POSITIVE, check_instance, check_number, check_tensors, check_values_exist
from klamp.core.masking import Totals
from klamp.core.types import Batch, Mask
from klamp.errors import DataError, EmptyMaskError, NonFiniteError, ShapeError

# Log-probabilities rounded in bfloat16 can end just above zero.
POSITIVE_TOLERANCE = 1e-2


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
    """Checks the values of a batch (or of a part of one) before any loss is computed; its shapes it checked itself.

    Raises:
        TensorError: tensors without values (on the meta device).
        ShapeError: a batch without tokens.
        EmptyMaskError: nothing to train on.
        NonFiniteError: NaN or infinite log-probabilities or advantages.
        DataError: log-probabilities above 0, or a `kl_weight` below 0.
    """
    check_values_exist("policy_logprobs", batch.policy_logprobs)
    if batch.mask.numel() == 0:
        raise ShapeError(
            "the batch has no tokens",
            got=f"policy_logprobs {tuple(batch.mask.shape)}",
            why="there is nothing to average over",
            fix="leave empty batches out",
        )
    check_mask(batch.mask, part=part)
    scored = batch.mask if batch.kl_weight is None else batch.mask & _check_weight(batch.kl_weight)
    for name in ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
        x: Tensor | None = getattr(batch, name)
        if x is not None:
            check_logprobs(name, x, scored if name == "ref_logprobs" else batch.mask)
    _check_advantages(batch.advantages, batch.mask)


def check_totals(totals: Totals) -> None:
    """Refuse the size of a whole batch that is none; numbers on a device are not looked at.

    Raises:
        ConfigError: no `Totals`, or a number in it that is not positive.
    """
    check_instance("totals", totals, Totals, fix="Totals(sequences=..., tokens=..., kl_tokens=...)")
    for name, x in totals._asdict().items():
        if not isinstance(x, Tensor):
            check_number(f"totals.{name}", x, POSITIVE.but("a loss is divided by it", "count the whole batch"))


def _check_weight(weight: Tensor) -> Tensor:
    """Checks `kl_weight` and says which sequences have a KL, [B, 1]."""
    if not bool(((weight >= 0) & weight.isfinite()).all()):
        raise DataError(
            "kl_weight must hold one finite number >= 0 per sequence",
            got=f"{int((~((weight >= 0) & weight.isfinite())).sum())} of {weight.numel()} are none",
            why="it is the factor on each sequence's KL; a negative one would reward leaving the reference",
            fix="1 / share for the sequences that the reference scored, 0 for the others",
        )
    return (weight > 0).unsqueeze(-1)


def _check_advantages(advantages: Tensor, mask: Mask) -> None:
    finite = advantages.isfinite() if advantages.ndim == 1 else advantages.isfinite() | ~mask
    if not bool(finite.all()):
        raise NonFiniteError(
            "an advantage is NaN or infinite",
            got=f"{int((~finite).sum())} of {finite.numel()}",
            why="it would turn the whole update into NaN",
            fix="check the rewards; group_advantages never returns NaN for finite rewards",
        )
