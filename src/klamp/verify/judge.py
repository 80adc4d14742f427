"""Judging a KL function that somebody else wrote: what it estimates, what its gradient does, where it breaks.

A `KLFunction` maps the log-probabilities of sampled tokens under policy and reference, both `[B, T]`, to one number
per token, `[B, T]`; whatever a trainer calls its per-token KL can be brought into that form. `judge` runs it through
the enumeration oracle in float64, with tokens sampled from the policy, and at log-ratios of +-30 nats in every
floating-point type:

    >>> import torch
    >>> k3 = judge(lambda policy, ref: torch.exp(ref - policy) - (ref - policy) - 1, name="k3")
    >>> k3.value.estimates, k3.gradient.follows.in_words
    ('KL(policy||ref)', 'KL(ref||policy)')
    >>> k3.probe(torch.float16, -30.0).fault
    'the value is inf'
    >>> k3.clamp.above, k3.clamp.below
    (None, None)

The function is never told which world it is in, so nothing here can be tuned to. An exception that it raises in a
low precision becomes a finding, not a crash; in float64 it is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from klamp.errors import ShapeError, unknown_name
from klamp.verify.oracle import (
    Loss,
    Pull,
    expected,
    expected_gradient,
    forward_kl,
    in_reward,
    pull_of,
    reverse_kl,
    truths,
    variance,
)
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, random_positions

KLFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAR = 30.0
"""The log-ratio of the probes, in nats."""
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
    """The expected value of the function."""
    reverse_kl: float
    """KL(policy||ref)."""
    relative_bias: float
    """(expected - KL(policy||ref)) / KL(policy||ref)."""
    standard_deviation: float
    """Standard deviation of one token's value, root mean square over the worlds."""
    lowest: float
    """Lowest value of any token; below 0 for k1 and its kin."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The value and gradient of one token far from the reference, in one floating-point type."""

    dtype: torch.dtype
    """The floating-point type of the log-probabilities that the function got."""
    log_ratio: float
    """The log-ratio log policy - log ref, in nats."""
    value: float
    """The value that the function gave; NaN where it raised an exception."""
    gradient: float
    """d value / d log policy (as a reward: the coefficient of grad log policy); NaN where it raised."""
    error: str = ""
    """The exception, where there was one."""

    @property
    def finite(self) -> bool:
        """Whether value and gradient are both finite."""
        return math.isfinite(self.value) and math.isfinite(self.gradient)

    @property
    def alive(self) -> bool:
        """Whether the gradient is not zero."""
        return math.isfinite(self.gradient) and self.gradient != 0

    @property
    def pulls_back(self) -> bool:
        """Whether descending the gradient of this one token brings the policy back towards the reference."""
        return self.alive and (self.gradient > 0) == (self.log_ratio > 0)

    @property
    def fault(self) -> str:
        """What is wrong with this value or gradient, in words; "" where nothing is."""
        if self.error:
            return self.error
        for name, number in (("value", self.value), ("gradient", self.gradient)):
            if not math.isfinite(number):
                return f"the {name} is {number}"
        if not self.alive:
            return "the gradient is zero"
        return "" if self.pulls_back else "the gradient pushes away from the reference"


@dataclass(frozen=True, kw_only=True)
class ClampFinding:
    """The log-ratios (nats) beyond which the gradient is exactly zero, in float64; None: it never is."""

    above: float | None
    """The bound for tokens that are likelier under the policy than under the reference."""
    below: float | None
    """The bound for tokens that are less likely under the policy; negative."""

    @property
    def everywhere(self) -> bool:
        """Whether there is no gradient at any log-ratio: the value is detached."""
        return self.above == 0 and self.below == 0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Everything that was found out about one function."""

    name: str
    """The name of the function."""
    use: Use
    """How it was used: differentiated as a loss, or as a number in the reward."""
    value: ValueFinding
    """What the function estimates."""
    gradient: Pull
    """Where the function's gradient points."""
    probes: tuple[Probe, ...]
    """The values and gradients far from the reference."""
    clamp: ClampFinding
    """Where the function's gradient stops."""

    def probe(self, dtype: torch.dtype, log_ratio: float) -> Probe:
        """The probe in this floating-point type at this log-ratio, which is 30 or -30.

        Raises:
            UnknownNameError: there is none.
        """
        for each in self.probes:
            if (each.dtype, each.log_ratio) == (dtype, log_ratio):
                return each
        raise unknown_name("probe", f"{dtype} at {log_ratio:g}", [f"{p.dtype} at {p.log_ratio:g}" for p in self.probes])

    @property
    def faults(self) -> list[str]:
        """What is wrong with the function as a penalty on KL(policy||ref), one sentence each; [] where nothing is.

        A single token's gradient of the wrong sign counts only where the expected gradient is wrong too: k1's is +1
        at every token, whatever its log-ratio.
        """
        found: list[str] = []
        if self.value.estimates != "KL(policy||ref)":
            bias = f"{100 * self.value.relative_bias:+.3g} % off KL(policy||ref)"
            found.append(f"its expected value is {self.value.estimates}: {bias}")
        follows = self.gradient.follows
        right = follows.name == "reverse" and follows.factor > 0
        if not right:
            that = "" if follows.name == "zero" else "that of "
            found.append(f"its expected gradient is {that}{follows.in_words}")
        if self.clamp.everywhere:
            return [*found, "it carries no gradient of its own"]
        for side, where in (("above", self.clamp.above), ("below", self.clamp.below)):
            if where is not None:
                found.append(f"its gradient is exactly zero {side} a log-ratio of {where:+.4g} nats")
        return found + far_faults([probe for probe in self.probes if not (right and probe.finite and probe.alive)])


def far_faults(probes: Sequence[Probe]) -> list[str]:
    """What is wrong far from the reference, a sentence for each log-ratio and fault, with its floating-point types."""
    kinds: dict[tuple[float, str], list[str]] = {}
    for probe in (each for each in probes if each.fault):
        kinds.setdefault((probe.log_ratio, probe.fault), []).append(str(probe.dtype).removeprefix("torch."))
    return [f"at {log_ratio:+g} nats {fault} ({', '.join(names)})" for (log_ratio, fault), names in kinds.items()]


def judge(function: KLFunction, *, name: str = "", use: Use = "loss") -> Judgement:
    """Finds out what a per-token KL function estimates, where its gradient points, and where it breaks.

    Sampler: tokens come from the policy, and are enumerated, so that there is no sampling error.
    Value: E_policy[f] against KL(policy||ref) and KL(ref||policy).
    Gradient: with use `loss` that of E_policy[f], the tokens held fixed, as a trainer has it; with use `reward` that of
    the score function, E_policy[sg(f) grad log policy]. Descending it lowers what it is the gradient of.

    Args:
        function: (policy_logprobs [B, T] with gradient, ref_logprobs [B, T]) -> [B, T].
        name: what to call it; default: its own name.
        use: whether a trainer differentiates it, or takes it from the reward.

    Raises:
        ShapeError: the function does not return one number per token.
        UnknownNameError: an unknown use.
    """
    if use not in USES:
        raise unknown_name("use", use, USES)
    chains = random_positions(3)
    return Judgement(
        name=name or str(getattr(function, "__name__", type(function).__name__)),
        use=use,
        value=judge_value(as_loss(function), chains),
        gradient=judge_gradient(as_loss(function, use), chains),
        probes=probe_far(function, use),
        clamp=ClampFinding(above=_find_clamp(function, 1, use), below=_find_clamp(function, -1, use)),
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
    reverse, forward = (torch.stack([kl(chain).detach() for chain in chains]) for kl in (reverse_kl, forward_kl))
    deviation = torch.stack([variance(chain, loss).double() for chain in chains]).mean().sqrt()
    value, target = means.mean().item(), reverse.mean().item()
    return ValueFinding(
        estimates=_name_value(means, reverse, forward),
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


def _name_value(means: Tensor, reverse: Tensor, forward: Tensor) -> str:
    known = {
        "KL(policy||ref)": reverse,
        "KL(ref||policy)": forward,
        "minus KL(policy||ref)": -reverse,
        "minus KL(ref||policy)": -forward,
        "zero": torch.zeros_like(reverse),
    }
    for name, values in known.items():
        if bool(((means - values).abs() <= TOLERANCE * reverse).all()):
            return name
    return "neither KL"


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


def probe_far(function: KLFunction, use: Use = "loss") -> tuple[Probe, ...]:
    """One token at +30 and at -30 nats in every floating-point type."""
    return tuple(_probe(function, dtype, side * FAR, use) for dtype in DTYPES for side in (1, -1))


def _probe(function: KLFunction, dtype: torch.dtype, log_ratio: float, use: Use) -> Probe:
    try:
        value, gradient = one_token(function, dtype, log_ratio, use)
    except ShapeError:
        raise
    except Exception as error:  # a foreign function may raise anything; that is the finding
        text = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        return Probe(dtype=dtype, log_ratio=log_ratio, value=math.nan, gradient=math.nan, error=text)
    return Probe(dtype=dtype, log_ratio=log_ratio, value=value, gradient=gradient)


def _find_clamp(function: KLFunction, side: int, use: Use) -> float | None:
    """The log-ratio beyond which the gradient stays zero up to `SCAN_TO`, found to 1e-6 nats; None: there is none."""

    def dead(size: float) -> bool:
        return one_token(function, torch.float64, side * size, use)[1] == 0

    sizes = [SCAN_STEP * (i + 1) for i in range(round(SCAN_TO / SCAN_STEP))]
    first = next((i for i in reversed(range(len(sizes))) if not dead(sizes[i])), -1) + 1
    if first == len(sizes):
        return None
    low, high = (sizes[first - 1] if first else 0.0), sizes[first]
    while first and high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if dead(middle) else (middle, high)
    return side * round(high, 6) if first else 0.0
