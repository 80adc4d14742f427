"""What a beta costs: the reward for one nat of a whole completion, from the divisors, the baseline and the scaling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import KLConfig, LossConfig
from klamp.config.loss import configured_price, price_at_distance, spread_of_group, spreads_of_right_or_wrong

PLACED = {"kl_estimator": "k1", "kl_horizon": "sequence"}


def price(kl: KLConfig, loss: LossConfig, **changes):
    return configured_price(kl, loss, **{"group_size": 4, "mean_length": 10.0, "max_length": 50, **changes})


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
def test_reduced_alike_beta_is_the_price_whatever_the_length(loss_type):
    loss = LossConfig(loss_type=loss_type, scale_rewards="none", advantage_baseline="leave_one_out")
    for length in (1.0, 350.0):
        assert price(KLConfig(beta=0.04), loss, mean_length=length).per_completion == pytest.approx(0.04)


def test_another_reduction_of_the_kl_is_the_ratio_of_the_divisors():
    loss = LossConfig(loss_type="dr_grpo", advantage_baseline="leave_one_out")
    found = {
        name: price(KLConfig(beta=0.04, kl_normalizer=name), loss).per_completion
        for name in ("fixed_length", "token_mean", "sequence_mean", "sequence_sum")
    }
    expected = {"fixed_length": 0.04, "token_mean": 0.2, "sequence_mean": 0.2, "sequence_sum": 2.0}
    assert found == pytest.approx(expected)


def test_a_mean_that_holds_the_own_reward_shrinks_the_policy_gradient():
    loss = LossConfig(advantage_baseline="mean")
    for placed, expected in (({}, 4 / 3), ({**PLACED, "kl_placement": "advantage"}, 4 / 3)):
        assert price(KLConfig(beta=0.3, **placed), loss).per_completion == pytest.approx(0.3 * expected)
    in_reward = KLConfig(beta=0.3, **PLACED, kl_placement="reward")
    assert price(in_reward, loss).per_completion == pytest.approx(0.3)


def test_division_by_the_std_leaves_no_single_price():
    found = price(KLConfig(beta=0.04), LossConfig(loss_type="grpo", advantage_baseline="mean"))
    assert found.scaled
    assert [found.at(std) for std in (0.1, 0.5)] == pytest.approx([0.04 * 4 / 3 * 0.1, 0.04 * 4 / 3 * 0.5])
    assert price(KLConfig(beta=0.04), LossConfig(advantage_baseline="mean")).at(0.1) == pytest.approx(0.04 * 4 / 3)


@given(right=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5))
def test_the_spread_is_that_of_the_groups_that_teach_something(right):
    rewards = torch.tensor(right, dtype=torch.float64)
    spreads = rewards.std(-1)
    saturated = (rewards == rewards[:, :1]).all(-1)
    found = spread_of_group(float(spreads.mean()), float(saturated.double().mean()))
    least, most = spreads_of_right_or_wrong(6)
    if saturated.all():
        assert found is None
    else:
        assert found == pytest.approx(float(spreads[~saturated].mean()))
        assert least - 1e-9 <= found <= most + 1e-9


def test_the_price_of_a_distance_is_to_second_order_that_of_the_mean_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = 0.1 * torch.randn(200, 50, generator=generator, dtype=torch.float64)
    second = float(rewards.var(-1).mean().sqrt()) / math.sqrt(2 * 0.001)
    assert price_at_distance(rewards, 0.001) == pytest.approx(second, rel=0.02)
    assert price_at_distance(rewards + 7, 0.001) == pytest.approx(price_at_distance(rewards, 0.001), rel=1e-9)
    assert price_at_distance(3 * rewards, 0.001) == pytest.approx(3 * price_at_distance(rewards, 0.001), rel=1e-9)
    halved = torch.cat([rewards, torch.zeros_like(rewards)])
    assert price_at_distance(halved, 0.001) == pytest.approx(second / math.sqrt(2), rel=0.02), "saturated groups count"


def test_beyond_the_best_completions_there_is_no_price() -> None:
    half = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    most = math.log(2) * 4 / 3
    assert price_at_distance(half, most - 0.01) > 0 and price_at_distance(half, most + 0.01) == 0.0
    assert price_at_distance(torch.ones(3, 4), 0.01) == 0.0


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("kl", [0.05, 5.0])
def test_rewards_without_an_end_are_priced_as_a_gaussians_beyond_what_a_group_can_show(size: int, kl: float) -> None:
    """The optimum at price p of Gaussian rewards is the Gaussian moved by s^2 / p: s^2 / (2 p^2) nats."""
    rewards = 0.1 * torch.randn(4000, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert price_at_distance(rewards, kl) == pytest.approx(0.1 / math.sqrt(2 * kl), rel=0.05)


@pytest.mark.parametrize("kl", [0.01, 0.2, 0.5])
def test_with_the_forward_kl_the_price_is_that_of_the_best_policy_for_it(kl: float) -> None:
    """The best policy is searched for: the largest mean of q reward - p KL(uniform||q)."""
    rewards = torch.tensor([[0.0, 0.0, 0.3, 1.0, 1.0], [0.2, 0.9, 0.9, 0.3, 0.1]], dtype=torch.float64)
    price = price_at_distance(rewards, kl, direction="forward")
    logits = torch.zeros_like(rewards, requires_grad=True)
    search = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        logprobs = logits.log_softmax(-1)
        worth = -((logprobs.exp() * rewards).sum() + price * logprobs.mean(-1).sum())
        worth.backward()
        return worth

    search.step(loss)  # pyright: ignore[reportArgumentType]
    best = logits.detach().log_softmax(-1)
    reached = float((best.exp() * (best + math.log(5))).sum(-1).mean())
    assert reached == pytest.approx(kl * 4 / 5, rel=1e-4)
    assert kl < 0.5 or price < 0.8 * price_at_distance(rewards, kl)
