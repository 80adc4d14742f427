"""Measures how far from the reference a KL function still has the right gradient, in each floating-point type.

A function may be right on paper and still lose its gradient: to overflow (exp(30) in float16), or to cancellation, when
two terms of size exp(30) leave a difference of 30. The float64 gradient of the same function is the measure, so that a
clamp, which is the same in every type, does not count here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from klamp.verify.judge import KLFunction, Use, one_token

WRONG = 0.1
"""A gradient is wrong when it is off by more than this share of the float64 one."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The range of log-ratios, in whole nats, in which value and gradient are right in one floating-point type."""

    dtype: torch.dtype
    """The floating-point type of the log-probabilities."""
    low: int
    """The lowest log-ratio of the range, 0 or less."""
    high: int
    """The highest log-ratio of the range, 0 or more."""
    far: int
    """The largest log-ratio, of either sign, that was tried."""
    failure: str = ""
    """What happens first beyond them: inf, nan, zero, off, or raises; empty where nothing does."""

    @property
    def everywhere(self) -> bool:
        """Whether no log-ratio that was tried went wrong."""
        return -self.low == self.high == self.far


def measure_reach(function: KLFunction, dtype: torch.dtype, *, use: Use = "loss", far: float = 30.0) -> Reach:
    """Raises the log-ratio nat by nat until the gradient differs from that in float64.

    Args:
        function: (policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T].
        dtype: type of both arguments.
        use: whether the function is differentiated, or its value is the coefficient.
        far: where to stop, in nats.
    """
    low, below = _walk(function, dtype, -1, use, int(far))
    high, above = _walk(function, dtype, 1, use, int(far))
    return Reach(dtype=dtype, low=-low, high=high, far=int(far), failure=below or above)


def _walk(function: KLFunction, dtype: torch.dtype, side: int, use: Use, far: int) -> tuple[int, str]:
    for size in range(1, far + 1):
        failure = _compare(function, dtype, side * size, use)
        if failure:
            return size - 1, failure
    return far, ""


def _compare(function: KLFunction, dtype: torch.dtype, log_ratio: int, use: Use) -> str:
    _, right = one_token(function, torch.float64, log_ratio, use)
    try:
        value, got = one_token(function, dtype, log_ratio, use)
    except Exception:  # a foreign function may raise anything; the judge quotes it
        return "raises"
    for number in (value, got):
        if not math.isfinite(number):
            return "nan" if math.isnan(number) else "inf"
    if right == 0 or abs(got - right) <= WRONG * abs(right):
        return ""
    return "zero" if got == 0 else "off"
