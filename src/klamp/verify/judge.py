"""Judging a KL function that somebody else wrote: what it estimates, what its gradient does, where it stops.

A `KLFunction` maps the log-probabilities of sampled tokens under policy and reference, both `[B, T]`, to one number
per token, `[B, T]`; whatever a trainer calls its per-token KL can be brought into that form. `judge` runs it through
the enumeration oracle in float64, with tokens sampled from the policy:

    >>> import torch
    >>> k3 = lambda policy, ref: torch.exp(ref - policy) - (ref - policy) - 1
    >>> judge(k3).value.estimates, judge(k3).gradient.follows.in_words
    ('KL(policy||ref)', 'KL(ref||policy)')
    >>> judge(k3).clamp
    (None, None)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from klamp.errors import ShapeError, unknown_name
from klamp.verify import oracle
from klamp.verify.oracle import Loss, Pull, expected, expected_gradient, in_reward, pull_of, truths
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, random_positions

KLFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAR = 30.0
"""A large log-ratio, in nats, at which value and gradient are still to be right."""
TOLERANCE = 1e-5
"""Relative error up to which values are equal; functions that compute in float32 must still be recognised."""
SCAN_TO, SCAN_STEP = 60.0, 0.25
"""How far out, and how finely, a clamp is looked for, in nats."""

Use: TypeAlias = Literal["loss", "reward"]
USES: tuple[Use, ...] = get_args(Use)


@dataclass(frozen=True, kw_only=True)
class ValueFinding:
    """What the expected value of the function is, for tokens of the policy; nats per token, mean over the worlds."""

    estimates: str
    """The quantity that it estimates without bias: KL(policy||ref), KL(ref||policy), these with a minus, zero, or
    "neither KL"."""
    expected: float
    reverse_kl: float
    relative_bias: float
    """(expected - KL(policy||ref)) / KL(policy||ref)."""
    standard_deviation: float
    """Standard deviation of one token's value, root mean square over the worlds."""
    lowest: float
    """Lowest value of any token; below 0 for k1 and its kin."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What was found out about one function."""

    value: ValueFinding
    gradient: Pull
    clamp: tuple[float | None, float | None]
    """The log-ratios (nats) below and above which the gradient is exactly zero, in float64; None: it never is. Both are
    0 where the value is detached."""


def judge(function: KLFunction, *, use: Use = "loss") -> Judgement:
    """Finds out what a per-token KL function estimates, where its gradient points, and where it stops.

    Sampler: tokens come from the policy, and are enumerated, so that there is no sampling error.
    Value: E_policy[f] against KL(policy||ref) and KL(ref||policy).
    Gradient: with use `loss` that of E_policy[f], the tokens held fixed, as a trainer has it; with use `reward` that of
    the score function, E_policy[sg(f) grad log policy]. Descending it lowers what it is the gradient of.

    Args:
        function: (policy_logprobs [B, T] with gradient, ref_logprobs [B, T]) -> [B, T].
        use: whether a trainer differentiates it, or takes it from the reward.

    Raises:
        ShapeError: the function does not return one number per token.
        UnknownNameError: an unknown use.
    """
    if use not in USES:
        raise unknown_name("use", use, USES)
    chains = random_positions(3)
    return Judgement(
        value=judge_value(as_loss(function), chains),
        gradient=judge_gradient(as_loss(function, use), chains),
        clamp=(_find_clamp(function, -1, use), _find_clamp(function, 1, use)),
    )


def as_loss(function: KLFunction, use: Use = "loss") -> Loss:
    """The function as a loss of enumerated completions, differentiated or taken from the reward."""

    def loss(outcomes: Outcomes) -> Tensor:
        return _call(function, outcomes.policy_logprobs, outcomes.ref_logprobs)

    return in_reward(loss) if use == "reward" else loss


def _call(function: KLFunction, policy: Tensor, ref: Tensor) -> Tensor:
    values = function(policy, ref)
    if not isinstance(values, Tensor) or values.shape != policy.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShapeError(
            "a KL function must return one number per token",
            got=tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__,  # pyright: ignore
            why=f"it got log-probabilities of shape {tuple(policy.shape)}",
            fix="wrap it so that it takes and returns [batch, tokens]",
        )
    return values


def judge_value(loss: Loss, chains: Sequence[Chain]) -> ValueFinding:
    """What the expected value of a loss per token is, over worlds of one position."""
    means = torch.stack([expected(chain, loss).double() for chain in chains])
    reverse, forward = (
        torch.stack([kl(chain).detach() for chain in chains]) for kl in (oracle.reverse_kl, oracle.forward_kl)
    )
    deviation = torch.stack([oracle.variance(chain, loss).double() for chain in chains]).mean().sqrt()
    value, target = means.mean().item(), reverse.mean().item()
    known = {
        "KL(policy||ref)": reverse,
        "KL(ref||policy)": forward,
        "minus KL(policy||ref)": -reverse,
        "minus KL(ref||policy)": -forward,
        "zero": torch.zeros_like(reverse),
    }
    names = [name for name, values in known.items() if ((means - values).abs() <= TOLERANCE * reverse).all()]
    return ValueFinding(
        estimates=names[0] if names else "neither KL",
        expected=value,
        reverse_kl=target,
        relative_bias=(value - target) / target,
        standard_deviation=deviation.item(),
        lowest=min(loss(enumerate_outcomes(chain)).min().item() for chain in chains),
    )


def judge_gradient(loss: Loss, chains: Sequence[Chain]) -> Pull:
    """Where the expected gradient of a loss per token points; KL(policy||ref) minus KL(ref||policy) is known too."""
    known = [truths(chain) for chain in chains]
    known = [exact | {"reverse - forward": exact["reverse"] - exact["forward"]} for exact in known]
    return pull_of([expected_gradient(chain, loss) for chain in chains], known, tolerance=TOLERANCE)


def one_token(function: KLFunction, dtype: torch.dtype, log_ratio: float, use: Use = "loss") -> tuple[float, float]:
    """The value and gradient of one token at this log-ratio."""
    likely, unlikely = -0.5, -0.5 - abs(log_ratio)
    first, second = (likely, unlikely) if log_ratio > 0 else (unlikely, likely)
    policy = torch.tensor([[first]], dtype=dtype, requires_grad=True)
    values = _call(function, policy, torch.tensor([[second]], dtype=dtype))
    if use == "reward":
        return values.item(), values.item()
    if not values.requires_grad:
        return values.item(), 0.0
    (slope,) = torch.autograd.grad(values.sum(), policy, allow_unused=True)
    return values.item(), 0.0 if slope is None else slope.item()


def _find_clamp(function: KLFunction, side: int, use: Use) -> float | None:
    """The log-ratio beyond which the gradient stays zero up to `SCAN_TO`, found to 1e-6 nats; None: there is none."""

    def dead(size: float) -> bool:
        return one_token(function, torch.float64, side * size, use)[1] == 0

    sizes = [SCAN_STEP * (i + 1) for i in range(round(SCAN_TO / SCAN_STEP))]
    last = next((size for size in reversed(sizes) if not dead(size)), 0.0)
    if last in (0.0, sizes[-1]):
        return None if last else 0.0
    low, high = last, last + SCAN_STEP
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if dead(middle) else (middle, high)
    return side * round(high, 6)
