"""The KL estimators' values: formulas, bias and variance by enumeration and quadrature, sign, precision."""

import math

import pytest
import torch

from klamp.core.estimators import ESTIMATORS, kl_estimate
from klamp.errors import ConfigError

SAMPLED = ("k1", "k2", "k3", "abs")
FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "abs": lambda d: math.copysign(1.0, d),
}
DELTAS = (-3.0, -0.5, -0.01, 0.25, 1.0, 4.0)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", SAMPLED)
def test_each_estimator_is_its_formula_in_log_policy_minus_log_ref(estimator):
    policy = double([-5.0] * len(DELTAS))
    values = kl_estimate(policy, policy - double(DELTAS), estimator=estimator)
    assert values.tolist() == pytest.approx([FORMULAS[estimator](d) for d in DELTAS], abs=1e-14)


@pytest.mark.parametrize("estimator", SAMPLED)
def test_the_derivative_of_each_estimator_is_its_own_slope(estimator):
    policy = double([-5.0] * len(DELTAS)).requires_grad_(True)
    kl_estimate(policy, policy.detach() - double(DELTAS), estimator=estimator).sum().backward()
    assert policy.grad.tolist() == pytest.approx([SLOPES[estimator](d) for d in DELTAS], abs=1e-14)
    by_table = ESTIMATORS[estimator].derivative(double(DELTAS))
    assert by_table.tolist() == pytest.approx(policy.grad.tolist(), abs=1e-14)


@pytest.mark.parametrize("exponent", range(-20, -3))
def test_k3_keeps_its_sign_and_size_near_zero_in_float32(exponent):
    delta = 2.0**exponent
    for sign in (1.0, -1.0):
        value = kl_estimate(torch.tensor(-1.0), torch.tensor(-1.0 - sign * delta)).item()
        moved = -1.0 - float(torch.tensor(-1.0 - sign * delta))
        assert value == pytest.approx(math.expm1(-moved) + moved, rel=0.02, abs=1.2e-7 * delta)
        assert value >= 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_ratios_are_not_rounded_again(dtype):
    # Both numbers are exact in either type; their difference is exact in neither.
    policy, ref = torch.tensor([-1.0078125], dtype=dtype), torch.tensor([-30.5], dtype=dtype)
    assert kl_estimate(policy, ref, estimator="k1").item() == 29.4921875


@pytest.mark.usefixtures("shapes_unchecked")
def test_exact_needs_logits_and_says_so():
    with pytest.raises(ConfigError, match="logits"):
        kl_estimate(torch.zeros(2), torch.zeros(2), estimator="exact")
