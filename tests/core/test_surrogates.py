"""Policy losses: clip regions by hand, gradients against loops, and the policy gradient by enumeration."""

import pytest
import torch
from tests.core.test_estimators import double

from klamp.core.surrogates import cispo, ppo_clip, ratio_clipped, score_function
from klamp.verify.oracle import expected_gradient
from klamp.verify.worlds import enumerate_outcomes, random_chain

SURROGATES = {"ppo_clip": ppo_clip, "cispo": cispo, "score_function": score_function}


def ratios(*values):
    old = double([[-2.0] * len(values)])
    return (old + double([values]).log()).requires_grad_(True), old


def loss_and_slope(surrogate, policy, old, advantages, **bounds):
    loss = surrogate(policy, old, advantages, **bounds)
    (slope,) = torch.autograd.grad(loss.sum(), policy)
    return loss.detach(), slope


def test_ppo_clips_only_past_a_bound_in_the_direction_of_the_advantage():
    policy, old = ratios(0.5, 0.9, 1.0, 1.1, 1.5)
    good = loss_and_slope(ppo_clip, policy, old, double([2.0]))
    bad = loss_and_slope(ppo_clip, policy, old, double([-2.0]))
    assert good[0][0].tolist() == pytest.approx([-1.0, -1.8, -2.0, -2.2, -2.4])
    assert good[1][0].tolist() == pytest.approx([-1.0, -1.8, -2.0, -2.2, 0.0])
    assert bad[0][0].tolist() == pytest.approx([1.6, 1.8, 2.0, 2.2, 3.0])
    assert bad[1][0].tolist() == pytest.approx([0.0, 1.8, 2.0, 2.2, 3.0])


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.3, 0.15), (0.0, 0.0), (1.0, 0.28)])
def test_the_tokens_that_count_as_clipped_are_those_that_ppo_gives_no_gradient(low, high):
    policy, old = ratios(0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
    share = 0.0
    for advantages in (double([2.0]), double([-2.0]), double([[1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0]])):
        _, slope = loss_and_slope(ppo_clip, policy, old, advantages, clip_low=low, clip_high=high)
        clipped = ratio_clipped(policy, old, advantages, clip_low=low, clip_high=high)
        assert torch.equal(clipped, slope == 0)
        share += float(clipped.float().mean())
    assert share > 0
    assert not ratio_clipped(policy, old, double([0.0]), clip_low=low, clip_high=high).any()


def test_cispo_is_minus_the_bounded_ratio_times_the_advantage_times_log_policy_and_keeps_every_gradient():
    policy, old = ratios(0.5, 1.0, 1.5, 20.0)
    weights = double([[0.8, 1.0, 1.3, 1.3]])
    for advantage in (2.0, -2.0):
        loss, slope = loss_and_slope(cispo, policy, old, double([advantage]), clip_low=0.2, clip_high=0.3)
        assert torch.allclose(slope, -weights * advantage, rtol=1e-12, atol=0)
        assert torch.allclose(loss, -weights * advantage * policy.detach(), rtol=1e-12, atol=0)
    policy, old = ratios(0.01, 1.0, 1.27, 1.5)
    _, slope = loss_and_slope(cispo, policy, old, double([1.0]))
    assert slope[0].tolist() == pytest.approx([-0.01, -1.0, -1.27, -1.28])


def test_the_score_function_ignores_the_old_policy():
    policy, old = ratios(0.5, 3.0)
    loss, slope = loss_and_slope(score_function, policy, old, double([2.0]))
    assert torch.allclose(loss, -2.0 * policy.detach(), rtol=1e-12, atol=0)
    assert slope[0].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("name", SURROGATES)
def test_in_a_square_batch_an_advantage_still_belongs_to_its_row_and_the_old_policy_gets_no_gradient(name):
    policy, old = (torch.full((2, 2), -1.0, requires_grad=True) for _ in range(2))
    SURROGATES[name](policy, old, torch.tensor([1.0, -1.0])).sum().backward()
    assert policy.grad.tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    assert old.grad is None or (old.grad == 0).all()


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_the_expected_gradient_is_minus_the_gradient_of_the_expected_reward(name):
    chain = random_chain(1, vocab=3, length=3)
    y = enumerate_outcomes(chain)
    rewards = torch.randn(len(y.probs), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (truth,) = torch.autograd.grad((y.policy_logprobs.sum(-1).exp() * rewards).sum(), chain.policy_logits)

    def loss(z):
        return SURROGATES[name](z.policy_logprobs, z.sampler_logprobs, rewards)

    assert torch.allclose(expected_gradient(chain, loss), -truth, rtol=0, atol=1e-13)


def test_one_token_off_policy_only_the_ratio_gives_the_policy_gradient():
    chain = random_chain(3, vocab=4, length=1, eos=None, sampler="other")
    y = enumerate_outcomes(chain)
    rewards = double([0.0, 1.0, 0.3, -0.4])
    (truth,) = torch.autograd.grad((y.policy_logprobs[:, 0].exp() * rewards).sum(), chain.policy_logits)

    def gradient(surrogate, **bounds):
        return expected_gradient(chain, lambda z: surrogate(z.policy_logprobs, z.sampler_logprobs, rewards, **bounds))

    wide = {"clip_low": 1.0, "clip_high": 1e6}
    for surrogate in (ppo_clip, cispo):
        assert torch.allclose(gradient(surrogate, **wide), -truth, rtol=0, atol=1e-13)
    assert (gradient(score_function) + truth).norm() > 0.1 * truth.norm()
