"""How far out a gradient is right in each floating-point type: overflow, cancellation, and what is neither."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from klamp.audit.examine import Reach, measure_reach
from klamp.core.gradients import kl_penalty


def k2(policy: Tensor, ref: Tensor) -> Tensor:
    return (policy - ref).square() / 2


def k3(policy: Tensor, ref: Tensor) -> Tensor:
    return torch.exp(ref - policy) - (ref - policy) - 1


def weighted_k3(policy: Tensor, ref: Tensor) -> Tensor:
    return k3(policy, ref) * torch.exp(policy - policy.detach())


def summary(reach: Reach) -> tuple[int, int, str]:
    return reach.low, reach.high, reach.failure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k2_is_right_everywhere(dtype: torch.dtype) -> None:
    assert summary(measure_reach(k2, dtype)) == (-30, 30, "")
    assert measure_reach(k2, dtype).everywhere


def test_float16_overflows_where_exp_does() -> None:
    limit = math.log(torch.finfo(torch.float16).max)
    assert summary(measure_reach(k3, torch.float16)) == (-math.floor(limit), 30, "inf")


def test_a_weighted_k3_loses_its_gradient_to_cancellation() -> None:
    """Its gradient is a difference of two numbers of size exp(d), whose rounding passes d / 10 at about 17 nats."""
    low, high, failure = summary(measure_reach(weighted_k3, torch.float32))
    assert (low, high, failure) == (-17, 30, "off")
    assert math.exp(17) * torch.finfo(torch.float32).eps > 0.1 * 17
    assert measure_reach(weighted_k3, torch.bfloat16).low == -5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_from_its_coefficient_keeps_it(dtype: torch.dtype) -> None:
    def penalty(policy: Tensor, ref: Tensor) -> Tensor:
        return kl_penalty(policy, ref, torch.ones_like(policy, dtype=torch.bool), value="k2", gradient="reverse")

    assert measure_reach(penalty, dtype).everywhere


def test_a_clamp_is_no_matter_of_precision() -> None:
    assert measure_reach(lambda p, ref: (p - ref).clamp(-2, 2).square() / 2, torch.float32).everywhere


def test_nan_zero_and_exceptions_are_told_apart() -> None:
    def broken(kind: str):
        def function(policy: Tensor, ref: Tensor) -> Tensor:
            if policy.dtype == torch.float64:
                return k2(policy, ref)
            if kind == "raises":
                raise TypeError("no such kernel")
            return {"nan": k2(policy, ref) * math.nan, "zero": k2(policy.detach(), ref)}[kind]

        return function

    for kind in ("nan", "zero", "raises"):
        assert summary(measure_reach(broken(kind), torch.float32)) == (0, 0, kind)


def test_in_the_reward_the_value_is_the_coefficient() -> None:
    assert summary(measure_reach(k3, torch.float16, use="reward")) == (-11, 30, "inf")
    assert measure_reach(lambda p, ref: (p - ref).detach(), torch.float16, use="reward").everywhere


def test_further_out_when_asked() -> None:
    assert summary(measure_reach(k3, torch.float32, far=100.0)) == (-88, 100, "inf")
