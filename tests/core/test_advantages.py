"""Group advantages: by hand, exactly zero without variance, and the bias of each baseline by enumerating groups."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_clipping import double

from klamp.core.advantages import group_advantages, saturated_share
from klamp.errors import NonFiniteError
from klamp.verify.worlds import random_chain

SETTINGS = [(s, b) for s in ("std", "none") for b in ("mean", "leave_one_out")]


def test_the_baselines_by_hand_the_mean_and_the_mean_of_the_others():
    advantages = group_advantages(double(1, 0, 0, 1, 4, 6), 2, scale="none")
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]
    advantages = group_advantages(double(1, 0, 5, 2), 4, scale="none", baseline="leave_one_out")
    others = [(0 + 5 + 2) / 3, (1 + 5 + 2) / 3, (1 + 0 + 2) / 3, (1 + 0 + 5) / 3]
    assert advantages.tolist() == pytest.approx([1 - others[0], 0 - others[1], 5 - others[2], 2 - others[3]])


def test_std_is_the_unbiased_sample_deviation_as_torch_computes_it():
    rewards = double(1, 0, 0, 1, 0.2, 0.9, 0.4, 0.4)
    groups = rewards.view(2, 4)
    by_hand = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    assert torch.allclose(group_advantages(rewards, 4), by_hand.flatten(), rtol=0, atol=1e-14)
    two = group_advantages(double(0, 1), 2, eps=1e-12)
    assert two.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])  # with division by n it would be -1, 1


@pytest.mark.parametrize(("scale", "baseline"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero_never_rounding_noise(scale, baseline, dtype):
    for size in (2, 3, 5, 7, 8, 10, 16):
        rewards = torch.tensor([0.1, 0.7, 1 / 3, 1e-8, 123.456, -0.3], dtype=dtype).repeat_interleave(size)
        advantages = group_advantages(rewards, size, scale=scale, baseline=baseline, eps=1e-8)
        assert (advantages == 0).all()


@pytest.mark.parametrize(("scale", "baseline"), SETTINGS)
@settings(max_examples=25)
@given(size=st.integers(2, 6), groups=st.integers(1, 3), data=st.data())
def test_advantages_sum_to_zero_ignore_shifts_and_follow_permutations(scale, baseline, size, groups, data):
    numbers = st.lists(st.integers(-50, 50), min_size=size * groups, max_size=size * groups)
    rewards = double(*data.draw(numbers)) / 10
    choices = {"scale": scale, "baseline": baseline}
    advantages = group_advantages(rewards, size, **choices)
    assert advantages.view(-1, size).sum(-1).abs().max() < 1e-9
    order = data.draw(st.permutations(range(size)))
    renamed, wanted = (x.view(-1, size)[:, order].flatten() for x in (rewards + 7.0, advantages))
    assert torch.allclose(group_advantages(renamed, size, **choices), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("size", "share"), [(1, 1.0), (2, 2 / 3), (3, 0.0), (6, 0.0)])
def test_the_share_of_saturated_groups_counts_those_whose_rewards_are_all_equal(size, share):
    assert saturated_share(double(1, 1, 0, 1, 2, 2), size).item() == pytest.approx(share)


def expected_group_gradient(chain, rewards, size, **choices):
    logprobs = chain.logprobs("policy")[0]
    gradient = torch.zeros_like(chain.policy_logits)
    for group in itertools.product(range(chain.vocab), repeat=size):
        drawn = list(group)
        prob = logprobs[drawn].sum().exp().detach()
        advantages = group_advantages(rewards[drawn], size, **choices)
        loss = (advantages * logprobs[drawn]).mean()
        gradient += prob * torch.autograd.grad(loss, chain.policy_logits, retain_graph=True)[0]
    return gradient


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_the_gradient(size):
    chain = random_chain(0, vocab=3, length=1, eos=None)
    rewards = double(0.0, 1.0, 0.3)
    objective = (chain.logprobs("policy")[0].exp() * rewards).sum()
    (truth,) = torch.autograd.grad(objective, chain.policy_logits)
    unbiased = expected_group_gradient(chain, rewards, size, scale="none", baseline="leave_one_out")
    shrunk = expected_group_gradient(chain, rewards, size, scale="none", baseline="mean")
    assert torch.allclose(unbiased, truth, rtol=0, atol=1e-14)
    assert torch.allclose(shrunk, truth * (size - 1) / size, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_a_number_is_refused(bad):
    with pytest.raises(NonFiniteError, match="reward"):
        group_advantages(double(0, bad, 1, 1), 2)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_reward_whose_square_is_past_the_largest_number_is_refused(scale):
    with pytest.raises(NonFiniteError, match="too large for the variance"):
        group_advantages(torch.tensor([0.0, 3e38, 0.0, 3e38]), 4, scale=scale)
    assert group_advantages(torch.tensor([0.0, 1e17]), 2, scale=scale).isfinite().all()
