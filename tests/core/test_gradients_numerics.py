"""The penalty at the edges: thirty nats in every dtype, hostile padding, masks of every kind, weights that overflow."""

import math

import pytest
import torch

from klamp.core.estimators import kl_estimate
from klamp.core.gradients import kl_penalty, saturation

VALUES = ("k1", "k2", "k3", "abs")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHOICES = [
    {"gradient": gradient, "horizon": horizon, "value": value}
    for value in ("k1", "k3")
    for gradient, horizon in (
        ("reverse", "token"),
        ("forward", "token"),
        ("own", "token"),
        ("reverse", "sequence"),
        ("forward", "sequence"),
    )
]
POISONS = (float("nan"), float("inf"), -float("inf"), 1e30, -1e4)


def value_and_slope(policy, ref, mask, behavior=None, **choices):
    policy = policy.clone().requires_grad_(True)
    result = kl_penalty(policy, ref, mask, behavior_logprobs=behavior, **choices)
    (slope,) = torch.autograd.grad(result.sum(), policy)
    return result.detach(), slope


def random_batch(seed, rows=4, tokens=6):
    generator = torch.Generator().manual_seed(seed)
    policy, ref, behavior = (-3 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(rows, tokens, generator=generator) > 0.4
    mask[0], mask[1], mask[2] = True, False, torch.arange(tokens) == 2
    return policy, ref, behavior, mask


def far_tokens(dtype):
    near, far = [[-0.5]], [[-30.5]]
    above = torch.tensor(near, dtype=dtype), torch.tensor(far, dtype=dtype)
    return {30.0: above, -30.0: above[::-1]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_thirty_nats_give_a_finite_value_and_the_full_pull_back_to_the_reference(dtype, value, horizon):
    for delta, (policy, ref) in far_tokens(dtype).items():
        choices = {"value": value, "gradient": "reverse", "horizon": horizon}
        result, slope = value_and_slope(policy, ref, torch.tensor([[True]]), **choices)
        formula = {"k1": delta, "k2": delta**2 / 2, "k3": math.expm1(-delta) + delta, "abs": 30.0}[value]
        assert result.item() == pytest.approx(formula, rel=1e-6)
        assert slope.item() == delta


@pytest.mark.parametrize("horizon", ["token", "sequence"])
@pytest.mark.parametrize("gradient", ["reverse", "forward"])
def test_a_bounded_weight_stays_finite_where_the_bare_one_overflows(horizon, gradient):
    policy, behavior = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-201.0, -201.0]])
    ref = torch.tensor([[-1.0, -2.0]])
    choices = {"gradient": gradient, "horizon": horizon, "max_weight": 10.0}
    result, slope = value_and_slope(policy, ref, torch.ones(1, 2, dtype=torch.bool), behavior, **choices)
    assert torch.isfinite(result).all()
    assert torch.isfinite(slope).all()
    assert result[0, 0] == 0.0
    assert result[0, 1].item() == pytest.approx(10 * math.exp(-1), rel=1e-5)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_the_forward_gradient_survives_a_policy_that_has_all_but_dropped_the_token(horizon):
    # w = policy/mu underflows and u = ref/policy overflows, yet w - ref/mu is simply -1.
    policy, ref, behavior = torch.tensor([[-200.0]]), torch.tensor([[-1.0]]), torch.tensor([[-1.0]])
    choices = {"gradient": "forward", "horizon": horizon}
    result, slope = value_and_slope(policy, ref, torch.tensor([[True]]), behavior, **choices)
    assert slope.item() == pytest.approx(-1.0, rel=1e-6)
    assert result.item() == pytest.approx(1.0, rel=1e-6)  # w (u - 1 + delta) = ref/mu - w + w delta


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("corrected", [False, True])
def test_whatever_stands_under_the_mask_changes_neither_value_nor_gradient(choices, poison, corrected):
    policy, ref, behavior, mask = random_batch(1)
    clean = value_and_slope(policy, ref, mask, behavior if corrected else None, **choices)
    assert clean[1][mask].abs().min() > 0
    for victims in ((0,), (1,), (2,), (0, 1, 2)):
        dirty = [torch.where(mask, x, poison) if i in victims else x for i, x in enumerate((policy, ref, behavior))]
        result = value_and_slope(*dirty[:2], mask, dirty[2] if corrected else None, **choices)
        assert torch.equal(result[0], clean[0])
        assert torch.equal(result[1], clean[1])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_a_token_that_the_reference_forbids_costs_infinitely_much_however_small_its_weight(value, horizon):
    """The weight exp(-199) is 0 in float32, and 0 times infinity is no number; the product is infinite all the same."""
    policy, ref, behavior = (
        torch.tensor([[-200.0, -1.0]]),
        torch.tensor([[-math.inf, -1.5]]),
        torch.tensor([[-1.0, -1.0]]),
    )
    mask = torch.tensor([[True, True]])
    found, slope = value_and_slope(policy, ref, mask, behavior, value=value, horizon=horizon)
    assert found[0, 0] == math.inf and slope[0, 0] == math.inf
    assert found[0, 1].isfinite() and slope[0, 1].isfinite()
    found, slope = value_and_slope(policy, ref, torch.tensor([[False, True]]), behavior, value=value, horizon=horizon)
    assert found[0, 0] == 0 and found.isfinite().all() and slope.isfinite().all()


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_infinite_weight_gives_infinity_or_0_and_never_nan(choices, dtype):
    """Where policy and reference agree the penalty is 0 whatever the weight; inf * 0 and inf - inf are no numbers."""
    policy, behavior = torch.tensor([[-1.0], [-1.0], [-40.0]], dtype=dtype), torch.full((3, 1), -2000.0, dtype=dtype)
    ref = torch.tensor([[-1.0], [-9.0], [-1.0]], dtype=dtype)
    found, slope = value_and_slope(policy, ref, torch.ones(3, 1, dtype=torch.bool), behavior, **choices)
    assert not found.isnan().any() and not slope.isnan().any()
    assert found[0] == 0 and found[1:].isinf().all()
    assert slope[0] == (math.inf if choices == {"gradient": "own", "horizon": "token", "value": "k1"} else 0)
    assert slope[1:].isinf().all()


@pytest.mark.parametrize(("dtype", "nats"), [(torch.float32, 200.0), (torch.float64, 900.0)])
@pytest.mark.parametrize("gradient", ["reverse", "none"])
def test_the_value_is_finite_wherever_the_gradient_is(dtype, nats, gradient):
    """k3 of a token 89 nats (float64: 710) below the reference is larger than the largest number."""
    policy, ref = torch.full((4, 500), -nats - 1, dtype=dtype), torch.full((4, 500), -1.0, dtype=dtype)
    mask = torch.ones(4, 500, dtype=torch.bool)
    assert kl_estimate(policy, ref).isinf().all(), "the estimator itself is left as it is"
    found, slope = value_and_slope(policy, ref, mask, gradient=gradient)
    assert slope.isfinite().all() and found.sum().isfinite()
    assert (found == saturation(dtype)).all()


def test_the_value_is_infinite_where_the_gradient_or_the_log_ratio_is():
    mask = torch.tensor([[True, True]])
    far, forbidden = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-1.0, -math.inf]])
    found, slope = value_and_slope(torch.tensor([[-1.0, -200.0]]), far, mask, gradient="forward")
    assert slope[0, 1].isinf() and found[0, 1] == math.inf
    found, slope = value_and_slope(torch.tensor([[-1.0, -2.0]]), forbidden, mask, gradient="none")
    assert found[0, 1] == math.inf and slope.isfinite().all()
