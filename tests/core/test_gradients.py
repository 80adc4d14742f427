"""Which divergence's gradient flows at one position and over sequences, by enumeration; and at the edges of numbers."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from tests.batches import flat_batch, objective_of
from torch import Tensor

from klamp.core.estimators import ESTIMATORS, kl_estimate
from klamp.core.gradients import kl_penalty, saturation
from klamp.core.heads.kl import linear_kl
from klamp.core.heads.logprobs import linear_logprobs
from klamp.core.objective import grpo_loss
from klamp.core.penalty import kl_metrics
from klamp.core.term import KLTerm, measure
from klamp.core.types import Batch, Scored
from klamp.errors import ConfigError, TensorError
from klamp.verify.oracle import NOTHING_KNOWN, examine, expected_gradient, local_kl, reverse_kl
from klamp.verify.worlds import enumerate_outcomes, random_chain

VALUES = ("k1", "k2", "k3", "abs")
HORIZONS = ("token", "sequence")


def one_token(seed=0, *, sampler="policy"):
    return random_chain(seed, vocab=5, length=1, eos=None, sampler=sampler)


def delta(y):
    return y.policy_logprobs - y.ref_logprobs


def k3(y):
    return torch.exp(-delta(y)) - 1 + delta(y)


def weight(y):
    return (y.policy_logprobs - y.sampler_logprobs).exp()


def penalty(*, corrected=False, **choices):
    def loss(y):
        behavior = y.sampler_logprobs if corrected else None
        return kl_penalty(y.policy_logprobs, y.ref_logprobs, y.mask, behavior_logprobs=behavior, **choices)

    return loss


def close(actual, target, tolerance=1e-13):
    return torch.allclose(actual, target, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("value", "name"), [("k1", "zero"), ("k2", "reverse"), ("k3", "forward"), ("abs", NOTHING_KNOWN)]
)
def test_an_estimators_own_gradient(value, name, corrected):
    chain = one_token(4, sampler="other" if corrected else "policy")
    report = examine(chain, penalty(value=value, gradient="own", corrected=corrected))
    assert report.follows.is_exactly(name)
    assert report.gradient_variance > 0.1  # of k1 it is noise, not nothing


@pytest.mark.parametrize("horizon", HORIZONS)
@pytest.mark.parametrize("value", VALUES)
def test_gradient_none_is_a_value_without_a_gradient(value, horizon):
    report = examine(one_token(), penalty(value=value, gradient="none", horizon=horizon))
    assert report.follows.name == "zero"
    assert report.gradient_variance == 0.0
    assert abs(report.value) > 1e-3


def test_max_weight_truncates_the_weight_in_value_and_gradient():
    chain = one_token(9, sampler="other")
    y = enumerate_outcomes(chain)
    truncated = weight(y).detach().clamp(max=0.8)
    assert weight(y).min() < 0.8 < weight(y).max()
    choices = {"value": "k3", "corrected": True, "max_weight": 0.8}
    assert close(penalty(gradient="reverse", **choices)(y), truncated * k3(y))
    report = examine(chain, penalty(gradient="reverse", **choices))
    assert close(report.gradient, expected_gradient(chain, lambda z: truncated * delta(z) ** 2 / 2))
    own = examine(chain, penalty(gradient="own", **choices))
    assert close(own.gradient, expected_gradient(chain, lambda z: truncated * k3(z)))


def test_max_log_ratio_bounds_the_value_and_keeps_the_gradient_alive():
    policy = torch.tensor([[-1.0, -30.0, -2.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-25.0, -1.0, -2.5]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    bounded = torch.tensor([[5.0, -5.0, 0.5]], dtype=torch.float64)
    for value in VALUES:
        result = kl_penalty(policy, ref, mask, value=value, gradient="reverse", max_log_ratio=5.0)
        assert close(result, ESTIMATORS[value].value(bounded))
        (slope,) = torch.autograd.grad(result.sum(), policy)
        assert close(slope, bounded)
    (slope,) = torch.autograd.grad(kl_penalty(policy, ref, mask, gradient="forward", max_log_ratio=5.0).sum(), policy)
    assert close(slope, 1 - torch.exp(-bounded))


@pytest.mark.parametrize("gradient", ["reverse", "forward", "own"])
def test_only_the_policy_receives_a_gradient(gradient):
    policy, ref, behavior = (torch.full((1, 2), v, requires_grad=True) for v in (-1.0, -2.0, -1.5))
    mask = torch.ones(1, 2, dtype=torch.bool)
    kl_penalty(policy, ref, mask, gradient=gradient, behavior_logprobs=behavior).sum().backward()
    assert policy.grad.abs().min() > 0
    assert all(x.grad is None or (x.grad == 0).all() for x in (ref, behavior))


def test_policy_and_reference_the_wrong_way_round_are_refused():
    """Also in a batch; where both carry a gradient, or gradients are off, nobody knows that they are swapped."""
    scored, constant = torch.full((1, 2), -1.0, requires_grad=True), torch.full((1, 2), -2.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch = flat_batch(policy_logprobs=constant, ref_logprobs=scored, mask=mask, advantages=torch.zeros(1))
    for swapped in (lambda: kl_penalty(constant, scored, mask), lambda: grpo_loss(batch, objective_of(beta=0.1))):
        with pytest.raises(ConfigError, match="the reference has a gradient, and the policy has none"):
            swapped()
    kl_penalty(constant, constant, mask)
    kl_penalty(scored, scored.clone(), mask)
    with torch.no_grad():
        kl_penalty(constant, scored, mask)


TRAINED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
RATIOS = math.log(2) * torch.tensor([[1.0, 0.5, -2.0, 9.0], [-1.0, 3.0, -9.0, 9.0]], dtype=torch.float64)


def metrics_of(delta, **choices):
    zero = torch.zeros_like(delta)
    anchors = {"reference": Scored(zero), "sampler": Scored(zero)}
    batch = Batch(policy_logprobs=delta, mask=TRAINED, advantages=zero, anchors=anchors)
    return kl_metrics(measure(batch, KLTerm(**choices)))


@pytest.mark.parametrize(("horizon", "over"), [("token", [[0, 0, 0], [0, 1, 0]]), ("sequence", [[0, 1, 0], [0, 1, 0]])])
def test_the_share_of_truncated_weights_counts_trained_tokens_above_the_bound(horizon, over):
    share, larger = (
        metrics_of(RATIOS, off_policy=horizon, max_weight=bound)["kl/weights_truncated"] for bound in (2.0, 1.9)
    )
    assert share.item() == pytest.approx(sum(map(sum, over)) / 5)
    assert larger > share


def test_the_share_of_saturated_tokens_counts_trained_ones_whose_k3_a_loss_does_not_take_in():
    edge = -math.log(saturation(torch.float64))
    delta = torch.tensor([[edge - 1, edge + 1, 0.0, edge - 1], [1e3, edge - 2, edge - 9, 0.0]], dtype=torch.float64)
    assert metrics_of(delta)["kl/k3_saturated"].item() == pytest.approx(2 / 5)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("sampler", "horizon", "gradient", "name"),
    [
        *((sampler, "sequence", name, name) for sampler in ("policy", "other") for name in ("reverse", "forward")),
        ("policy", "token", "reverse", "local"),
        ("policy", "token", "forward", "local_forward"),
        ("other", "token", "reverse", "local_sampled"),
        ("other", "token", "forward", "local_sampled_forward"),
    ],
)
def test_which_gradient_flows_over_sequences_whoever_sampled(sampler, horizon, value, gradient, name):
    """Off-policy the token ratio values the sampler's prefixes, and every other unbiased value is the reverse KL."""
    chain = random_chain(0, vocab=3, length=4, sampler=sampler)
    choices = {"value": value, "gradient": gradient, "horizon": horizon, "corrected": sampler == "other"}
    report = examine(chain, penalty(**choices))
    assert report.follows.is_exactly(name)
    of_sampler = (horizon, sampler) == ("token", "other")
    truth = (local_kl(chain, prefixes="sampler") if of_sampler else reverse_kl(chain)).item()
    assert report.value == pytest.approx(truth, abs=1e-12) or value not in ("k1", "k3")


def test_own_with_the_sequence_horizon_is_refused():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ConfigError, match="own"):
        kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), mask, gradient="own", horizon="sequence")
    with pytest.raises(ConfigError, match="the exact forward KL has no sequence horizon"):
        KLTerm(value="exact", gradient="forward", horizon="sequence")


def random_batch(seed, rows=4, tokens=6):
    generator = torch.Generator().manual_seed(seed)
    policy, ref, behavior = (-3 * torch.rand(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(rows, tokens, generator=generator) > 0.4
    mask[0], mask[1], mask[2] = True, False, torch.arange(tokens) == 2
    return policy, ref, behavior, mask


def value_and_slope(policy, ref, mask, behavior=None, **choices):
    policy = policy.clone().requires_grad_(True)
    result = kl_penalty(policy, ref, mask, behavior_logprobs=behavior, **choices)
    (slope,) = torch.autograd.grad(result.sum(), policy)
    return result.detach(), slope


def loop_coefficients(policy, ref, behavior, mask, *, value, gradient):
    """The coefficients on grad log policy_t, written as the sums in the text."""
    slopes = torch.zeros_like(policy)
    for n in range(len(policy)):
        kept = [t for t in range(policy.shape[1]) if mask[n, t]]
        for i, t in enumerate(kept):
            d = [(policy - ref)[n, j].item() for j in kept]
            rho = [(policy - behavior)[n, kept[: k + 1]].sum().exp().item() for k in range(len(kept))]
            if gradient == "forward":
                slopes[n, t] = rho[i] - (ref - behavior)[n, kept[: i + 1]].sum().exp().item()
                continue
            future = [math.expm1(-x) + x if value == "k3" else x for x in d]
            slopes[n, t] = rho[i] * d[i] + sum(rho[k] * future[k] for k in range(i + 1, len(kept)))
    return slopes


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("gradient", ["reverse", "forward"])
@pytest.mark.parametrize("corrected", [False, True])
def test_sequence_coefficients_equal_a_plain_double_loop_over_the_unmasked_tokens(value, gradient, corrected):
    policy, ref, behavior, mask = random_batch(13)
    sampler, choices = behavior if corrected else policy, {"value": value, "gradient": gradient}
    _, slopes = value_and_slope(policy, ref, mask, behavior if corrected else None, horizon="sequence", **choices)
    wanted = loop_coefficients(policy, ref, sampler, mask, **choices)
    assert torch.allclose(slopes, wanted, rtol=1e-12, atol=1e-12)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHOICES = [
    {"gradient": gradient, "horizon": horizon, "value": value}
    for value, gradient, horizon in itertools.product(("k1", "k3"), ("reverse", "forward", "own"), HORIZONS)
    if (gradient, horizon) != ("own", "sequence")
]
POISONS = (float("nan"), float("inf"), -float("inf"), 1e30, -1e4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_thirty_nats_give_a_finite_value_and_the_full_pull_back_to_the_reference(dtype, value, horizon):
    near, far = (torch.tensor([[x]], dtype=dtype) for x in (-0.5, -30.5))
    for delta, policy, ref in ((30.0, near, far), (-30.0, far, near)):
        result, slope = value_and_slope(policy, ref, torch.tensor([[True]]), value=value, horizon=horizon)
        formula = {"k1": delta, "k2": delta**2 / 2, "k3": math.expm1(-delta) + delta, "abs": 30.0}[value]
        assert result.item() == pytest.approx(formula, rel=1e-6)
        assert slope.item() == delta


@pytest.mark.parametrize("horizon", HORIZONS)
@pytest.mark.parametrize("gradient", ["reverse", "forward"])
def test_a_bounded_weight_stays_finite_where_the_bare_one_overflows(horizon, gradient):
    policy, behavior = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-201.0, -201.0]])
    ref = torch.tensor([[-1.0, -2.0]])
    choices = {"gradient": gradient, "horizon": horizon, "max_weight": 10.0}
    result, slope = value_and_slope(policy, ref, torch.ones(1, 2, dtype=torch.bool), behavior, **choices)
    assert result.isfinite().all() and slope.isfinite().all() and result[0, 0] == 0.0
    assert result[0, 1].item() == pytest.approx(10 * math.exp(-1), rel=1e-5)


@pytest.mark.parametrize("horizon", HORIZONS)
def test_the_forward_gradient_survives_a_policy_that_has_all_but_dropped_the_token(horizon):
    # w = policy/mu underflows and u = ref/policy overflows, yet w - ref/mu is simply -1.
    policy, ref, behavior = torch.tensor([[-200.0]]), torch.tensor([[-1.0]]), torch.tensor([[-1.0]])
    result, slope = value_and_slope(policy, ref, torch.tensor([[True]]), behavior, gradient="forward", horizon=horizon)
    assert slope.item() == pytest.approx(-1.0, rel=1e-6)
    assert result.item() == pytest.approx(1.0, rel=1e-6)  # w (u - 1 + delta) = ref/mu - w + w delta


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("corrected", [False, True])
def test_whatever_stands_under_the_mask_changes_neither_value_nor_gradient(choices, corrected):
    *logprobs, mask = random_batch(1)
    logprobs = logprobs if corrected else logprobs[:2]
    clean = value_and_slope(*logprobs[:2], mask, *logprobs[2:], **choices)
    assert clean[1][mask].abs().min() > 0
    for poison, victim in itertools.product(POISONS, range(len(logprobs))):
        dirty = [torch.where(mask, x, poison) if i == victim else x for i, x in enumerate(logprobs)]
        result = value_and_slope(*dirty[:2], mask, *dirty[2:], **choices)
        assert torch.equal(result[0], clean[0]) and torch.equal(result[1], clean[1])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("horizon", HORIZONS)
def test_a_token_that_the_reference_forbids_costs_infinitely_much_however_small_its_weight(value, horizon):
    """The weight exp(-199) is 0 in float32, and 0 times infinity is no number; the product is infinite all the same."""
    policy, ref, behavior = torch.tensor([[[-200.0, -1.0]], [[-math.inf, -1.5]], [[-1.0, -1.0]]])
    found, slope = value_and_slope(policy, ref, torch.tensor([[True, True]]), behavior, value=value, horizon=horizon)
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
    assert kl_estimate(policy, ref).isinf().all(), "the estimator itself is left as it is"
    found, slope = value_and_slope(policy, ref, torch.ones(4, 500, dtype=torch.bool), gradient=gradient)
    assert slope.isfinite().all() and found.sum().isfinite() and (found == saturation(dtype)).all()


def test_the_value_is_infinite_where_the_gradient_or_the_log_ratio_is():
    mask = torch.tensor([[True, True]])
    far, forbidden = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-1.0, -math.inf]])
    found, slope = value_and_slope(torch.tensor([[-1.0, -200.0]]), far, mask, gradient="forward")
    assert slope[0, 1].isinf() and found[0, 1] == math.inf
    found, slope = value_and_slope(torch.tensor([[-1.0, -2.0]]), forbidden, mask, gradient="none")
    assert found[0, 1] == math.inf and slope.isfinite().all()


# what asks for more than a first derivative is refused, not answered wrongly -----------------------------------------

REF, MASK = torch.randn(3, 4).log_softmax(-1), torch.ones(3, 4, dtype=torch.bool)
HIDDEN, WEIGHT, TARGETS = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 2])

OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "kl_penalty": lambda x: kl_penalty(-x.abs(), REF[: len(x)], MASK[: len(x)]),
    "linear_logprobs": lambda x: linear_logprobs(x, WEIGHT, TARGETS[: len(x)]),
    "linear_logprobs of a head that learns": lambda x: linear_logprobs(x, x[:1] + WEIGHT, TARGETS[: len(x)]),
    "linear_kl": lambda x: linear_kl(x, WEIGHT, HIDDEN[: len(x)], 2 * WEIGHT),
}
"""Functions with a derivative of klamp's own, each of one tensor [N, 4]."""
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum())(HIDDEN),
    "jacrev": lambda function: torch.func.jacrev(function)(HIDDEN),
    "vmap": lambda function: torch.vmap(lambda x: function(x).sum())(HIDDEN.unsqueeze(1)),
    "jvp": lambda function: torch.func.jvp(function, (HIDDEN,), (HIDDEN,))[1],
}


@pytest.mark.usefixtures("shapes_unchecked")  # a transform's tensors are of classes of their own
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", [OWN["kl_penalty"], OWN["linear_kl"]], ids=["kl_penalty", "linear_kl"])
def test_torch_func_is_refused(function: Callable[[Tensor], Tensor], transform: Callable[..., Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"torch\.func") as caught:
        transform(function)
    assert "loss.backward()" in caught.value.fix


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("function", OWN.values(), ids=OWN)
def test_a_second_derivative_is_refused_where_its_graph_would_be_built(function: Callable[[Tensor], Tensor]) -> None:
    x = HIDDEN.clone().requires_grad_(True)
    with pytest.raises(ConfigError, match="no second derivative"):
        torch.autograd.grad(function(x).sum() + (x**2).sum(), x, create_graph=True)
    assert torch.autograd.grad(function(x).sum(), x)[0].isfinite().all()


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("learns", ["hidden", "weight"])
def test_inference_tensors_that_would_have_to_be_kept_are_refused(learns: str) -> None:
    with torch.inference_mode():
        hidden, weight = HIDDEN.clone(), WEIGHT.clone()
    mine, head = HIDDEN.clone().requires_grad_(learns == "hidden"), WEIGHT.clone().requires_grad_(learns == "weight")
    with pytest.raises(TensorError, match="inference_mode") as caught:
        linear_kl(mine, head, hidden, weight)
    assert "no_grad" in caught.value.fix
    assert linear_kl(mine, head, hidden.clone(), weight.clone()).requires_grad
