"""Clipping a KL at a budget, and the gate: the factor by which a clip scales the KL's gradient.

A clip acts on a total: the KL of one completion in nats. Taking relu of a *sampled* KL leaks (at KL .05, threshold .1
and noise .5 the gate is open 46 % of the time), so klamp gates: the derivative of the clip, at a detached low-noise KL,
multiplies a correct gradient. A gate computed from the same sampled tokens is correlated with them and follows no KL
(cosine .6 to .9 with the intended gradient): it is computed from the other completions, see `gate_kl`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from klamp.core.arguments import AT_LEAST_0, FLOATS, POSITIVE, REALS, check_flag, check_number, check_tensors, describe
from klamp.core.masking import future_sum, upcast
from klamp.core.types import ClipMethod
from klamp.errors import ConfigError, ShapeError, check_name

ClipLevel: TypeAlias = Literal["sequence", "group", "batch"]
ClipUnit: TypeAlias = Literal["token", "sequence"]
CLIP_TEMPERATURE = POSITIVE.but(
    "it is the width in nats over which the soft clip opens", "use a tenth of the total budget, or a hard clip"
)


def _check(method: str, temperature: float) -> None:
    check_name("KL clip method", method, get_args(ClipMethod))
    check_number("temperature", temperature, CLIP_TEMPERATURE)


def _check_kl(kl: Tensor, threshold: float | Tensor) -> None:
    check_tensors(FLOATS, kl=kl)
    if not isinstance(threshold, Tensor):
        check_number("threshold", threshold)
        return
    check_tensors(FLOATS, like=kl if threshold.ndim else threshold, threshold=threshold)
    if any(a not in (1, b) and b != 1 for a, b in zip(threshold.shape[::-1], kl.shape[::-1], strict=False)):
        raise ShapeError(
            "the threshold does not fit the KL",
            got=f"threshold {tuple(threshold.shape)}, kl {tuple(kl.shape)}",
            why="each KL is held against one threshold",
            fix="pass a number, or a tensor that broadcasts",
        )


def clip_kl(
    kl: Float[Tensor, "*shape"],
    threshold: float | Float[Tensor, "*shape"],
    *,
    method: ClipMethod,
    temperature: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """The part of a KL above a threshold; KL, threshold and the temperature (the soft clip's width) in nats.

    Equation::

        none    kl
        hard    max(0, kl - threshold)
        soft    temperature * softplus((kl - threshold) / temperature)

    Value: unbiased only for an exact `kl`; applied to a noisy estimate both clips over-estimate.
    Gradient: `hard` 0 below and 1 above, `soft` sigmoid((kl - threshold) / temperature): at temperature 1 and
    per-token units (threshold .05) that is .4875 at KL 0 and .5125 at KL .1, no clip at all. Clip totals.
    Shapes: any; `threshold` broadcasts.

    Raises:
        UnknownNameError: an unknown method.
        ConfigError: a temperature that is not positive, or a threshold that is not finite.
        TensorError: a KL that is not a tensor of floating-point numbers, or a threshold on another device.
        ShapeError: a threshold that does not broadcast.

    Source: the clipping notes (docs/sources.md)
    """
    _check(method, temperature)
    _check_kl(kl, threshold)
    kl = upcast(kl)
    if method == "none":
        return kl
    excess = kl - threshold
    return excess.relu() if method == "hard" else temperature * softplus(excess / temperature)


def clip_gate(
    kl: Float[Tensor, "*shape"],
    threshold: float | Float[Tensor, "*shape"],
    *,
    method: ClipMethod,
    temperature: float = 1.0,
) -> Float[Tensor, "*shape"]:
    """The derivative of `clip_kl` with respect to the KL, detached: the factor on the KL's gradient, in [0, 1].

    Equation: none 1; hard 1[kl > threshold], and 1 wherever the threshold is 0, so that a clip at 0 is no clip; soft
    sigmoid((kl - threshold) / temperature).
    """
    _check(method, temperature)
    kl = upcast(kl.detach())
    if method == "none":
        return torch.ones_like(kl)
    limit = torch.as_tensor(threshold, dtype=kl.dtype, device=kl.device)
    if method == "soft":
        return torch.sigmoid((kl - limit) / temperature)
    return ((kl > limit) | (limit <= 0)).to(kl.dtype)


def kl_budget(threshold: float, *, per_token: bool, reference_length: float | Tensor | None) -> float | Tensor:
    """Total KL budget of one completion in nats.

    Equation: threshold * reference_length if `per_token`, else threshold. 0.1 nats/token * 50 tokens = 5 nats.

    The reference length must not depend on what was generated: an integer, a data column, or the reference policy's
    own mean length measured once. Threshold times the *generated* length hands out budget per filler token. It is in
    tokens, one number or one per sequence; the threshold in nats per token, or in nats.

    Raises:
        ConfigError: a negative threshold, or a per-token threshold without a positive reference length.
        TensorError: reference lengths that are no numbers.

    Source: the clipping notes (docs/sources.md)
    """
    check_number("threshold", threshold, AT_LEAST_0.but("a KL is never negative", "use 0 for no free budget"))
    check_flag("per_token", per_token)
    if not per_token:
        return threshold
    if isinstance(reference_length, Tensor):
        check_tensors(REALS, reference_length=reference_length)
    elif reference_length is not None:
        check_number("reference_length", reference_length)
    if reference_length is None or not bool(torch.as_tensor(reference_length > 0).all()):
        raise ConfigError(
            "a per-token KL threshold needs a positive reference length",
            got=describe(reference_length),
            why="the budget of a completion is threshold * reference length",
            fix="set kl_reference_length, or use_per_token_kl_threshold=False",
        )
    return threshold * reference_length


def gate_kl(
    sequence_kl: Float[Tensor, " batch"],
    *,
    level: ClipLevel,
    group_size: int | None = None,
    own: bool,
    measured: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, " batch"]:
    """The KL m (in nats per sequence, detached) that the clip of each sequence is decided by.

    Equation: `sequence` the sequence's own; `group` and `batch` a mean, with `own` over all members, without it over
    the others (leave-one-out), of those that are `measured` (None: all); 0 if none is left. f being the clip and K the
    sequence's KL, the tangent f(m) + f'(m) (K - m) is charged.
    Bias: without `own`, m does not depend on the tokens that the gate f'(m) multiplies, so that the expected gradient
    is E_others[f'(m)] grad KL, for every estimator of K. With `own` the two are correlated: right only if K's gradient
    is the exact KL's at fixed prefixes; the whole then follows f(mean of the members).

    Raises:
        ShapeError: the batch is not a whole number of groups.
        ConfigError: the mean of the others in a group of one; or level `sequence` without `own`.
    """
    check_name("KL clip level", level, get_args(ClipLevel))
    kl = upcast(sequence_kl.detach())
    if level == "sequence" and own:
        return kl
    size = kl.shape[0] if level == "batch" else group_size
    if size is None or (size and kl.shape[0] % size):
        raise ShapeError(
            "the batch is not a whole number of groups",
            got=f"{kl.shape[0]} sequences, group size {group_size}",
            why="the gate of a sequence is the mean KL of its group",
            fix="keep the completions of a prompt together and pass their number as group_size",
        )
    if not own and (size == 1 or level == "sequence"):
        raise ConfigError(
            "a completion cannot be gated by a KL of its own tokens",
            got=f"level={level!r}, {size} completion(s) to take the mean of",
            why="the gate multiplies those tokens' gradient: the two are correlated, and the product follows no KL",
            fix="use two or more completions per prompt, or kl_estimator='exact' (kl_horizon='token')",
        )
    counts = torch.ones_like(kl) if measured is None else measured.to(kl.dtype)
    groups = (x.view(-1, max(size, 1)) for x in (torch.where(counts > 0, kl, torch.zeros_like(kl)), counts))
    total, n = (x.sum(-1, keepdim=True).expand_as(x) if own else _sum_of_others(x) for x in groups)
    return (total / n.clamp(min=1)).reshape(-1)


def _sum_of_others(x: Float[Tensor, "groups size"]) -> Float[Tensor, "groups size"]:
    """The sum over the other members of each group, without a subtraction, in which an infinite KL would be NaN."""
    return future_sum(x) + future_sum(x.flip(-1)).flip(-1)
