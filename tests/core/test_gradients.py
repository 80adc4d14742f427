"""Which divergence's gradient flows at one position: every row of the table, false claims included, by enumeration."""

import math

import pytest
import torch
from tests.batches import flat_batch, objective_of

from klamp.core.gradients import kl_penalty, saturation
from klamp.core.objective import grpo_loss
from klamp.core.penalty import kl_metrics
from klamp.core.term import KLTerm, measure
from klamp.core.types import Batch, Scored
from klamp.errors import ConfigError
from klamp.verify.oracle import NOTHING_KNOWN, examine, expected_gradient
from klamp.verify.worlds import enumerate_outcomes, random_chain

VALUES = ("k1", "k2", "k3", "abs")


def on_policy(seed=0):
    return random_chain(seed, vocab=5, length=1, eos=None)


def off_policy(seed=0):
    return random_chain(seed, vocab=5, length=1, eos=None, sampler="other")


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
    chain = off_policy(4) if corrected else on_policy(0)
    report = examine(chain, penalty(value=value, gradient="own", corrected=corrected))
    assert report.follows.is_exactly(name)
    assert report.gradient_variance > 0.1  # of k1 it is noise, not nothing


@pytest.mark.parametrize("horizon", ["token", "sequence"])
@pytest.mark.parametrize("value", VALUES)
def test_gradient_none_is_a_value_without_a_gradient(value, horizon):
    report = examine(on_policy(), penalty(value=value, gradient="none", horizon=horizon))
    assert report.follows.name == "zero"
    assert report.gradient_variance == 0.0
    assert abs(report.value) > 1e-3


def test_max_weight_truncates_the_weight_in_value_and_gradient():
    chain = off_policy(9)
    y = enumerate_outcomes(chain)
    truncated = weight(y).detach().clamp(max=0.8)
    assert (weight(y) > 0.8).any()
    assert (weight(y) < 0.8).any()
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
    for value, formula in {
        "k1": bounded,
        "k2": bounded**2 / 2,
        "k3": torch.exp(-bounded) - 1 + bounded,
        "abs": bounded.abs(),
    }.items():
        result = kl_penalty(policy, ref, mask, value=value, gradient="reverse", max_log_ratio=5.0)
        assert close(result, formula)
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
    assert ref.grad is None or (ref.grad == 0).all()
    assert behavior.grad is None or (behavior.grad == 0).all()


def test_policy_and_reference_the_wrong_way_round_are_refused():
    """Also in a batch; where both carry a gradient, or gradients are off, nobody knows that they are swapped."""
    scored, constant = torch.full((1, 2), -1.0, requires_grad=True), torch.full((1, 2), -2.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch = flat_batch(policy_logprobs=constant, ref_logprobs=scored, mask=mask, advantages=torch.zeros(1))
    for swapped in (lambda: kl_penalty(constant, scored, mask), lambda: grpo_loss(batch, objective_of(beta=0.1))):
        with pytest.raises(ConfigError, match="the reference carries the gradient, and the policy none"):
            swapped()
    kl_penalty(constant, constant, mask)
    kl_penalty(scored, scored.clone(), mask)
    with torch.no_grad():
        kl_penalty(constant, scored, mask)


TRAINED = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
LOG_2 = math.log(2)
RATIOS = LOG_2 * torch.tensor([[1.0, 0.5, -2.0, 9.0], [-1.0, 3.0, -9.0, 9.0]], dtype=torch.float64)


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
