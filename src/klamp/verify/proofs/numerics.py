"""Checks far from the reference, in every floating-point type: values are finite and gradients right, not zero."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from klamp.core.gradients import kl_penalty
from klamp.core.types import Estimator, Gradient
from klamp.verify.proofs.check import Check, is_true

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAR = 30.0
VALUES: tuple[Estimator, ...] = get_args(Estimator)


def prove_numerics() -> list[Check]:
    """Checks log-ratios of +-30 nats, and masked positions that hold -inf and NaN."""
    return [*(_pull(dtype) for dtype in DTYPES), *(_forward(dtype) for dtype in DTYPES), *_masked(), _cancellation()]


def _pull(dtype: torch.dtype) -> Check:
    """Checks gradient='reverse': the slope at one token is its log-ratio, for every value."""
    found: list[str] = []
    right = True
    for delta in (FAR, -FAR):
        slopes = {_slope(value, "reverse", dtype, delta) for value in VALUES}
        right &= slopes == {delta}
        found.append("/".join(f"{slope:+g}" for slope in sorted(slopes)))
    text = f"slopes {' and '.join(found)}"
    return is_true(f"{_name(dtype)}, +-30 nats, gradient reverse", right, text, expected="slopes +30 and -30")


def _forward(dtype: torch.dtype) -> Check:
    """Checks gradient='forward': 1 - ref/policy, which float16 holds only where the log-ratio is bounded."""
    bound = 10.0 if dtype == torch.float16 else None
    far = FAR if bound is None else bound
    slopes = [_slope("k3", "forward", dtype, delta, bound) for delta in (FAR, -FAR)]
    wanted = [-math.expm1(-far), -math.expm1(far)]
    right = all(abs(got / want - 1) < 5e-3 for got, want in zip(slopes, wanted, strict=True))
    extra = ", kl_max_log_ratio 10" if bound else ""
    return is_true(
        f"{_name(dtype)}, +-30 nats, gradient forward{extra}",
        right,
        f"slopes {slopes[0]:+.3g} and {slopes[1]:+.3g}",
        expected=f"slopes {wanted[0]:+.3g} and {wanted[1]:+.3g}",
    )


def _masked() -> list[Check]:
    """Checks that masked positions reach neither value nor gradient, whatever they hold."""
    checks: list[Check] = []
    for poison in (-math.inf, math.nan):
        policy = torch.tensor([[-1.0, poison]], requires_grad=True)
        ref, mask = torch.tensor([[-2.0, poison]]), torch.tensor([[True, False]])
        total = kl_penalty(policy, ref, mask).sum()
        (slope,) = torch.autograd.grad(total, policy)
        finite = bool(total.isfinite() and slope.isfinite().all() and slope[0, 1] == 0)
        checks.append(is_true(f"a masked {poison} changes nothing", finite, f"slopes {slope.tolist()[0]}"))
    return checks


def _cancellation() -> Check:
    """Checks that differentiating w * k3 in float32 loses the gradient far away, and that klamp's form keeps it."""
    policy, ref = torch.tensor([[-20.0]], requires_grad=True), torch.tensor([[0.0]])
    delta = policy - ref
    naive = (policy - policy.detach()).exp() * (torch.exp(-delta) - 1 + delta)
    (lost,) = torch.autograd.grad(naive.sum(), policy)
    kept = _slope("k3", "reverse", torch.float32, -20.0)
    right = abs(lost.item() + 20.0) > 1.0 and kept == -20.0
    text = f"klamp {kept:+g}, w k3 differentiated {lost.item():+g}"
    return is_true("float32, -20 nats: klamp keeps what w k3 loses", right, text, expected="klamp -20")


def _slope(
    value: Estimator, gradient: Gradient, dtype: torch.dtype, delta: float, max_log_ratio: float | None = None
) -> float:
    """d penalty / d log policy of one token; NaN where the penalty is not finite."""
    near, far = -0.5, -0.5 - abs(delta)
    first, second = (near, far) if delta > 0 else (far, near)
    policy = torch.tensor([[first]], dtype=dtype, requires_grad=True)
    ref: Tensor = torch.tensor([[second]], dtype=policy.dtype)
    penalty = kl_penalty(
        policy, ref, torch.tensor([[True]]), value=value, gradient=gradient, max_log_ratio=max_log_ratio
    )
    (slope,) = torch.autograd.grad(penalty.sum(), policy)
    return slope.item() if bool(penalty.isfinite().all()) else math.nan


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
