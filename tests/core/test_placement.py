"""Where the KL goes: in the reward or the advantage, what the score function makes of it, and the length arithmetic."""

from __future__ import annotations

import pytest
import torch

from klamp.core.advantages import group_advantages
from klamp.core.estimators import kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.penalty import kl_in_advantage, kl_in_reward
from klamp.core.surrogates import score_function
from klamp.errors import ShapeError
from klamp.verify.oracle import examine, expected_gradient, truths
from klamp.verify.worlds import Chain, enumerate_outcomes, one_position, random_chain


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def delta(y):
    return y.policy_logprobs - y.ref_logprobs


def rewarded(y, sequence_kl, beta=1.0):
    """The score-function loss of a zero reward with the KL taken from it."""
    rewards = kl_in_reward(torch.zeros_like(y.probs), sequence_kl, beta=beta)
    return score_function(y.policy_logprobs, y.sampler_logprobs, rewards)


# --- by hand --------------------------------------------------------------------------------------------------


def test_the_reward_loses_beta_times_the_kl():
    assert kl_in_reward(double([1.0, 0.0]), double([2.0, -0.5]), beta=0.1).tolist() == pytest.approx([0.8, 0.05])


def test_the_advantage_loses_beta_times_the_log_ratio_of_its_token_or_of_all_that_follow():
    policy, ref = double([[-1.0, -2.0, -3.0, 9.0]]), double([[-2.0, -1.5, -5.0, 1.0]])
    mask = torch.tensor([[True, True, True, False]])
    token = kl_in_advantage(double([1.0]), policy, ref, mask, beta=0.1, horizon="token")
    sequence = kl_in_advantage(double([1.0]), policy, ref, mask, beta=0.1, horizon="sequence")
    assert token[0, :3].tolist() == pytest.approx([1 - 0.1, 1 + 0.05, 1 - 0.2])
    assert sequence[0, :3].tolist() == pytest.approx([1 - 0.1 * 2.5, 1 - 0.1 * 1.5, 1 - 0.1 * 2.0])


def test_advantages_per_token_are_shifted_each_by_its_own():
    policy, ref = double([[-1.0, -2.0]]), double([[-2.0, -1.5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    shifted = kl_in_advantage(double([[3.0, 4.0]]), policy, ref, mask, beta=0.1, horizon="token")
    assert shifted[0].tolist() == pytest.approx([2.9, 4.05])


def test_neither_placement_lets_a_gradient_through():
    policy = double([[-1.0, -2.0]]).requires_grad_(True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for horizon in ("token", "sequence"):
        shifted = kl_in_advantage(double([1.0]), policy, policy.detach() - 1, mask, beta=0.1, horizon=horizon)
        assert not shifted.requires_grad
    assert not kl_in_reward(double([1.0]), policy.sum(-1), beta=0.1).requires_grad


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_padding_does_not_reach_the_advantages_of_real_tokens(poison, horizon):
    policy, ref = double([[-1.0, -2.0, -1.0, -1.0]]), double([[-2.0, -1.5, -1.0, -3.0]])
    mask = torch.tensor([[True, False, True, False]])
    clean = kl_in_advantage(double([1.0]), policy, ref, mask, beta=0.1, horizon=horizon)
    for dirty in ((torch.where(mask, policy, poison), ref), (policy, torch.where(mask, ref, poison))):
        shifted = kl_in_advantage(double([1.0]), *dirty, mask, beta=0.1, horizon=horizon)
        assert torch.equal(shifted[mask], clean[mask])


# --- what the score function makes of each estimator ----------------------------------------------------------


def test_k1_in_the_reward_is_the_reverse_kl():
    for chain in (random_chain(0, vocab=5, length=1, eos=None), random_chain(1, vocab=3, length=4)):
        report = examine(chain, lambda y: rewarded(y, delta(y).sum(-1)))
        assert "reverse" in report.names


def test_k3_in_the_reward_is_reverse_minus_forward():
    chain = random_chain(2, vocab=5, length=1, eos=None)
    k3 = examine(chain, lambda y: rewarded(y, kl_estimate(y.policy_logprobs, y.ref_logprobs).sum(-1)))
    exact = truths(chain)
    assert torch.allclose(k3.gradient, exact["reverse"] - exact["forward"], rtol=0, atol=1e-14)
    assert k3.names == []


def test_k3_in_the_reward_cancels_to_first_order_near_the_reference():
    shares = []
    for step in (1e-2, 1e-3):
        ref = double([0.3, -0.2, 0.9, 0.0])
        chain = one_position(ref + step * double([1.0, -0.4, 0.3, -2.0]), ref)
        k3 = expected_gradient(chain, lambda y: rewarded(y, kl_estimate(y.policy_logprobs, y.ref_logprobs)[:, 0]))
        shares.append((k3.norm() / truths(chain)["reverse"].norm()).item())
    assert shares[0] < 0.05
    assert shares[0] / shares[1] == pytest.approx(10.0, rel=0.1)


def test_k2_in_the_reward_is_biased():
    chain = random_chain(3, vocab=5, length=1, eos=None)
    report = examine(chain, lambda y: rewarded(y, (delta(y) ** 2 / 2).sum(-1)))
    assert report.names == []
    assert report.matches["reverse"].distance > 0.05


def test_the_kl_in_the_reward_must_not_be_divided_by_the_completions_own_length():
    chain = random_chain(4, vocab=3, length=4)
    report = examine(chain, lambda y: rewarded(y, delta(y).sum(-1) / y.mask.sum(-1)))
    assert report.names == []
    assert report.matches["reverse"].cosine < 0.99


@pytest.mark.parametrize("beta", [0.04, 2.0])
@pytest.mark.parametrize(("horizon", "name"), [("token", "local"), ("sequence", "reverse")])
def test_in_the_advantage_the_kl_keeps_its_beta_and_has_the_gradient_of_its_horizon(beta, horizon, name):
    chain = random_chain(5, vocab=3, length=4)

    def loss(y):
        zero = torch.zeros_like(y.probs)
        choices = {"beta": beta, "horizon": horizon}
        advantages = kl_in_advantage(zero, y.policy_logprobs, y.ref_logprobs, y.mask, **choices)
        return score_function(y.policy_logprobs, y.sampler_logprobs, advantages)

    report = examine(chain, loss)
    assert torch.allclose(report.gradient, beta * truths(chain)[name], rtol=0, atol=1e-13)


# --- saturated groups -----------------------------------------------------------------------------------------

SATURATED = double([1.0, 1.0, 1.0, 1.0])
KLS = double([0.5, 2.0, 1.0, 4.5])


def test_in_a_saturated_group_with_std_scaling_beta_drops_out_of_the_update():
    wanted = -(KLS - KLS.mean()) / KLS.std()
    for beta in (1e-3, 0.04, 0.4, 40.0):
        advantages = group_advantages(kl_in_reward(SATURATED, KLS, beta=beta), 4, eps=0.0)
        assert torch.allclose(advantages, wanted, rtol=1e-9, atol=1e-12)


def test_without_scaling_the_kl_in_the_reward_keeps_its_beta():
    for beta in (1e-3, 0.4):
        advantages = group_advantages(kl_in_reward(SATURATED, KLS, beta=beta), 4, scale="none")
        assert torch.allclose(advantages, -beta * (KLS - KLS.mean()), rtol=1e-9, atol=1e-12)


def test_placed_in_the_advantage_beta_keeps_its_meaning_in_a_saturated_group():
    policy, ref = -torch.rand(4, 3, dtype=torch.float64), -torch.rand(4, 3, dtype=torch.float64)
    mask = torch.ones(4, 3, dtype=torch.bool)
    advantages = group_advantages(SATURATED, 4)
    assert (advantages == 0).all()
    small, large = (kl_in_advantage(advantages, policy, ref, mask, beta=b, horizon="sequence") for b in (0.04, 0.4))
    assert torch.allclose(large, 10 * small, rtol=1e-12, atol=0)


def test_with_a_per_token_mean_kl_the_longest_completion_of_a_saturated_group_wins():
    total, lengths = double([2.0, 2.0, 2.0, 2.0]), double([10.0, 20.0, 40.0, 80.0])
    diluted = group_advantages(kl_in_reward(SATURATED, total / lengths, beta=0.04), 4)
    assert diluted.argmax().item() == 3
    assert (diluted.diff() > 0).all()
    summed = group_advantages(kl_in_reward(SATURATED, total, beta=0.04), 4)
    assert (summed == 0).all()


# --- length arithmetic of the loss ----------------------------------------------------------------------------


def per_length(y, tokens):
    return torch.where(y.mask, tokens, 0.0).sum(-1) / y.mask.sum(-1)


def at_the_reference():
    chain = random_chain(6, vocab=3, length=4)
    return Chain(policy_logits=chain.policy_logits, ref_logits=chain.policy_logits, length=4, eos=0)


def test_k1_over_length_as_a_loss_lengthens_even_where_there_is_no_kl():
    chain = at_the_reference()
    report = examine(chain, lambda y: per_length(y, delta(y)))
    y = enumerate_outcomes(chain)
    lengths = y.mask.sum(-1).double()
    probs = y.policy_logprobs.sum(-1).exp()
    (inverse_length,) = torch.autograd.grad((probs / lengths).sum(), chain.policy_logits, retain_graph=True)
    (mean_length,) = torch.autograd.grad((probs * lengths).sum(), chain.policy_logits)
    assert torch.allclose(report.gradient, inverse_length, rtol=0, atol=1e-14)
    assert (report.gradient * mean_length).sum() < -1e-3  # descent raises the mean length


@pytest.mark.parametrize("value", ["k2", "k3"])
def test_k2_and_k3_over_length_have_no_direct_incentive_to_lengthen(value):
    chain = at_the_reference()
    gradient = expected_gradient(
        chain,
        lambda y: per_length(y, kl_penalty(y.policy_logprobs, y.ref_logprobs, y.mask, value=value, gradient="own")),
    )
    assert gradient.abs().max() < 1e-15


def test_the_pull_on_a_drifted_token_fades_as_one_over_length():
    slopes = []
    for length in (10, 100, 1000):
        policy = torch.full((1, length), -1.0, dtype=torch.float64, requires_grad=True)
        ref = policy.detach().clone()
        ref[0, 0] -= 3.0
        mask = torch.ones(1, length, dtype=torch.bool)
        (slope,) = torch.autograd.grad(kl_penalty(policy, ref, mask).mean(), policy)
        slopes.append(slope[0, 0].item())
    assert slopes == pytest.approx([0.3, 0.03, 0.003])


@pytest.mark.usefixtures("shapes_unchecked")
def test_one_kl_per_reward_is_asked_for():
    with pytest.raises(ShapeError, match="KL"):
        kl_in_reward(double([1.0, 2.0]), double([[0.1, 0.2]]), beta=0.1)
