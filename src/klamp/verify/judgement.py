"""What `judge` finds out about a KL function, and what follows from it in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from klamp.errors import unknown_name
from klamp.verify.naming import Followed

Use: TypeAlias = Literal["loss", "reward"]

USES: tuple[Use, ...] = ("loss", "reward")


@dataclass(frozen=True, kw_only=True)
class ValueFinding:
    """What the function's expected value is, tokens sampled from the policy; nats per token, mean over the worlds."""

    estimates: str
    """The quantity that it estimates without bias: KL(policy||ref), KL(ref||policy), these with a minus, zero, or
    "neither KL"."""
    expected: float
    """Its expected value."""
    reverse_kl: float
    """KL(policy||ref)."""
    forward_kl: float
    """KL(ref||policy)."""
    relative_bias: float
    """(expected - KL(policy||ref)) / KL(policy||ref)."""
    standard_deviation: float
    """Of the value of one token, root mean square over the worlds."""
    lowest: float
    """Lowest value of any token; below 0 for k1 and its kin."""


@dataclass(frozen=True, kw_only=True)
class GradientFinding:
    """Where its expected gradient points, tokens sampled from the policy."""

    follows: Followed
    """The divergence whose gradient it is, and the factor on it."""
    cosine_reverse: float
    """Cosine with the gradient of KL(policy||ref); 0 for a gradient of zero."""
    cosine_forward: float
    """Cosine with the gradient of KL(ref||policy)."""
    size: float
    """Norm, in units of the norm of the gradient of KL(policy||ref)."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One token far from the reference, in one floating-point type."""

    dtype: torch.dtype
    """Type of the log-probabilities that the function got."""
    log_ratio: float
    """log policy - log ref, in nats."""
    value: float
    """What the function made of it; NaN where it raised."""
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
        """Whether there is a gradient at all."""
        return math.isfinite(self.gradient) and self.gradient != 0

    @property
    def pulls_back(self) -> bool:
        """Whether descending the gradient of this one token brings the policy back towards the reference."""
        return self.alive and (self.gradient > 0) == (self.log_ratio > 0)

    @property
    def fault(self) -> str:
        """What is wrong here, in words; empty where nothing is."""
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
    """Where the gradient stops: the log-ratio in nats from which on it is exactly zero, in float64; None: nowhere."""

    above: float | None
    """For tokens that the policy likes better than the reference."""
    below: float | None
    """For tokens that it likes less; negative."""

    @property
    def everywhere(self) -> bool:
        """Whether there is no gradient at any log-ratio: the value is detached."""
        return self.above == 0 and self.below == 0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Everything that was found out about one function."""

    name: str
    """What it was called."""
    use: Use
    """How it was used: differentiated as a loss, or as a number in the reward."""
    value: ValueFinding
    """What it estimates."""
    gradient: GradientFinding
    """What it does."""
    probes: tuple[Probe, ...]
    """What happens far from the reference."""
    clamp: ClampFinding
    """Where its gradient stops."""

    def probe(self, dtype: torch.dtype, log_ratio: float) -> Probe:
        """The probe in this type at this log-ratio (+-30).

        Raises:
            UnknownNameError: there is none.
        """
        for each in self.probes:
            if (each.dtype, each.log_ratio) == (dtype, log_ratio):
                return each
        raise unknown_name("probe", f"{dtype} at {log_ratio:g}", [f"{p.dtype} at {p.log_ratio:g}" for p in self.probes])

    @property
    def faults(self) -> list[str]:
        """What is wrong with it as a penalty on KL(policy||ref), a sentence each; [] when nothing is.

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
        faulty = [probe for probe in self.probes if probe.fault and not (right and probe.finite and probe.alive)]
        return found + _grouped(faulty)


def _grouped(faulty: Sequence[Probe]) -> list[str]:
    """One sentence per fault and log-ratio, with the types that have it."""
    kinds: dict[tuple[float, str], list[str]] = {}
    for probe in faulty:
        kinds.setdefault((probe.log_ratio, probe.fault), []).append(str(probe.dtype).removeprefix("torch."))
    return [f"at {log_ratio:+g} nats {fault} ({', '.join(names)})" for (log_ratio, fault), names in kinds.items()]
