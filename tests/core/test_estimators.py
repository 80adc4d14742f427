"""Estimators and the exact KL: formulas, slopes, directions, rounding, and what is refused."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import kl_div

from klamp.core.estimators import ESTIMATORS, exact_kl, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.errors import ConfigError, DataError, ShapeError

FORMULAS = {  # the estimator and its slope
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "abs": (abs, lambda d: math.copysign(1.0, d)),
}
DELTAS = (-3.0, -0.5, -0.01, 0.25, 1.0, 4.0)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_each_estimator_is_its_formula_in_log_policy_minus_log_ref_and_has_its_slope(estimator):
    policy = double([-5.0] * len(DELTAS)).requires_grad_(True)
    values = kl_estimate(policy, policy.detach() - double(DELTAS), estimator=estimator)
    formula, slope = ([function(d) for d in DELTAS] for function in FORMULAS[estimator])
    assert values.tolist() == pytest.approx(formula, abs=1e-14)
    assert torch.autograd.grad(values.sum(), policy)[0].tolist() == pytest.approx(slope, abs=1e-14)
    assert ESTIMATORS[estimator].derivative(double(DELTAS)).tolist() == pytest.approx(slope, abs=1e-14)


def test_k3_keeps_its_sign_and_size_near_zero_in_float32():
    for exponent, sign in itertools.product(range(-20, -3), (1.0, -1.0)):
        delta = 2.0**exponent
        value = kl_estimate(torch.tensor(-1.0), torch.tensor(-1.0 - sign * delta)).item()
        moved = -1.0 - float(torch.tensor(-1.0 - sign * delta))
        assert value == pytest.approx(math.expm1(-moved) + moved, rel=0.02, abs=1.2e-7 * delta) and value >= 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_ratios_are_not_rounded_again(dtype):
    # Both numbers are exact in either type; their difference is exact in neither.
    policy, ref = torch.tensor([-1.0078125], dtype=dtype), torch.tensor([-30.5], dtype=dtype)
    assert kl_estimate(policy, ref, estimator="k1").item() == 29.4921875


DIRECTIONS = ("reverse", "forward", "js")


def logits(seed, *shape):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_direction_agrees_with_torch_kl_div():
    policy, ref = logits(0, 3, 4, 7), logits(1, 3, 4, 7)
    p, q = policy.log_softmax(-1), ref.log_softmax(-1)
    mixture = torch.log((p.exp() + q.exp()) / 2)

    def kl(a, b):  # the first argument of kl_div is the second distribution
        return kl_div(b, a, reduction="none", log_target=True).sum(-1)

    expected = {"reverse": kl(p, q), "forward": kl(q, p), "js": (kl(p, mixture) + kl(q, mixture)) / 2}
    for direction, value in expected.items():
        assert torch.allclose(exact_kl(policy, ref, direction=direction), value, rtol=0, atol=1e-13)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_pass_gradcheck(direction):
    policy = logits(6, 2, 4).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: exact_kl(x, logits(7, 2, 4), direction=direction), policy)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_forbidden_in_both_models_contribute_nothing(direction):
    policy, ref = logits(10, 5), logits(11, 5)
    short = exact_kl(policy[:3], ref[:3], direction=direction).item()
    policy[3:], ref[3:] = -torch.inf, -torch.inf
    policy.requires_grad_(True)
    value = exact_kl(policy, ref, direction=direction)
    value.backward()
    assert value.item() == pytest.approx(short, abs=1e-14)
    assert torch.isfinite(policy.grad).all() and (policy.grad[3:] == 0).all()
    assert policy.grad[:3].abs().max() > 1e-3


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("step", [1e-5, 1e-3])
def test_close_to_the_reference_float32_never_reports_a_negative_kl(direction, step):
    # A controller refuses a negative KL: rounding must not be able to stop a run at its first step.
    ref = 3 * logits(13, 100, 200).float()
    policy = ref + step * logits(14, 100, 200).float()
    value = exact_kl(policy, ref, direction=direction)
    truth = exact_kl(policy.double(), ref.double(), direction=direction)
    assert (value >= 0).all()
    assert value.mean().item() == pytest.approx(truth.mean().item(), rel=0.05, abs=1e-7)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(("policy", "ref"), [((2, 3), (1, 3)), ((2, 3), (2, 1)), ((3,), (1, 3)), ((), ())])
def test_logits_that_would_broadcast_or_have_no_vocabulary_are_refused(policy, ref):
    with pytest.raises(ShapeError, match="vocabulary"):
        exact_kl(torch.zeros(policy), torch.zeros(ref))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_entry_that_rounds_to_probability_0_is_worth_0_where_the_reference_forbids_it(direction):
    """0 times an infinite log-ratio is no number: one model masks with -inf, the other with a large negative logit."""
    policy, ref = torch.tensor([[0.0, -1e4, 0.0]]), torch.tensor([[0.0, -torch.inf, 0.0]])
    value = exact_kl(policy.requires_grad_(True), ref, direction=direction)
    assert value.item() == 0.0 and (torch.autograd.grad(value.sum(), policy)[0] == 0).all()


@pytest.mark.parametrize("padding", [-math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_row_of_padding_is_chosen_before_the_arithmetic(direction, padding):
    """Case: a masked row of -inf; NaN put away afterwards leaves its gradient NaN."""
    policy = torch.tensor([[0.5, 0.2, -0.1]] * 2, dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-1.2, -0.6, -1.9], [padding] * 3], dtype=torch.float64)
    value, there = exact_kl(policy, teacher, direction=direction), torch.tensor([True, False])
    assert value.isnan().tolist() == [False, True]
    slope = torch.autograd.grad(torch.where(there, value, 0.0).sum(), policy)[0]
    expected = exact_kl(policy[:1], teacher[:1], direction=direction).sum()
    assert torch.equal(slope[0], torch.autograd.grad(expected, policy)[0][0]) and not slope[1].any()
    swapped = exact_kl(teacher, policy.detach(), direction=direction)
    assert swapped.isnan().tolist() == [False, True]


def test_nothing_flows_into_the_anchor():
    """Case: a teacher that is left trainable comes to the policy."""
    policy, teacher = (logits(seed, 2, 5).requires_grad_(True) for seed in range(2))
    for direction in DIRECTIONS:
        value = exact_kl(policy, teacher, direction=direction).sum()
        assert torch.autograd.grad(value, (policy, teacher), allow_unused=True)[1] is None
    with pytest.raises(ConfigError, match="has a gradient"):
        exact_kl(policy.detach(), teacher)


def test_what_is_no_logit_is_refused_and_logits_of_few_words_may_look_like_probabilities():
    whole, few = logits(1, 2, 5, 20), torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    for kind, ref in {"probabilities": whole.softmax(-1), "negative log-likelihoods": -whole.log_softmax(-1)}.items():
        with pytest.raises(DataError, match=f"ref_logits holds {kind}"):
            exact_kl(whole, ref)
    assert exact_kl(few, few).item() == 0


@pytest.mark.parametrize("form", ["logits", "probabilities", "negative log-likelihoods"])
def test_what_is_no_log_probability_is_refused(form):
    right = logits(2, 3, 4).abs().neg()
    wrong = {"logits": logits(3, 3, 4) + 3, "probabilities": right.exp(), "negative log-likelihoods": -right}[form]
    mask = torch.ones(3, 4, dtype=torch.bool)
    for call in (lambda: kl_penalty(right, wrong, mask), lambda: kl_estimate(wrong, right)):
        with pytest.raises(DataError, match="log-probabilities above 0"):
            call()
    padding = torch.arange(4).expand(3, 4) < 2
    kl_penalty(right, torch.where(padding, right, wrong.abs()), padding)


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_exact_kl_needs_logits_and_logits_elsewhere_are_refused_by_their_shape():
    with pytest.raises(ConfigError, match="logits"):
        kl_estimate(torch.zeros(2), torch.zeros(2), estimator="exact")
    with pytest.raises(ShapeError, match="the mask does not fit the values"):
        kl_penalty(logits(4, 3, 4, 7), logits(5, 3, 4, 7), torch.ones(3, 4, dtype=torch.bool))
