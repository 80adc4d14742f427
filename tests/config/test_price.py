"""What a beta costs: the reward for one nat of a whole completion, from the divisors, the baseline and the scaling."""

from __future__ import annotations

import pytest

from klamp.config import KLConfig, LossConfig
from klamp.config.price import price_of
from klamp.errors import ConfigError

PLACED = {"kl_estimator": "k1", "kl_horizon": "sequence"}


def price(kl: KLConfig, loss: LossConfig, **changes):
    return price_of(kl, loss, **{"group_size": 4, "mean_length": 10.0, "max_length": 50, **changes})


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
    loss = LossConfig(loss_type="dr_grpo")
    for placed, expected in (({}, 4 / 3), ({**PLACED, "kl_placement": "advantage"}, 4 / 3)):
        assert price(KLConfig(beta=0.3, **placed), loss).per_completion == pytest.approx(0.3 * expected)
    in_reward = KLConfig(beta=0.3, **PLACED, kl_placement="reward")
    assert price(in_reward, loss).per_completion == pytest.approx(0.3)


def test_division_by_the_std_leaves_no_single_price():
    found = price(KLConfig(beta=0.04), LossConfig())
    assert found.scaled
    assert [found.at(std) for std in (0.1, 0.5)] == pytest.approx([0.04 * 4 / 3 * 0.1, 0.04 * 4 / 3 * 0.5])
    assert price(KLConfig(beta=0.04), LossConfig(loss_type="dr_grpo")).at(0.1) == pytest.approx(0.04 * 4 / 3)


def test_the_beta_in_force_can_be_another_one():
    assert price(KLConfig(beta=0.04), LossConfig(loss_type="dr_grpo"), beta=3.0).per_completion == pytest.approx(4.0)


@pytest.mark.parametrize("wrong", [{"group_size": 1}, {"mean_length": 0.0}, {"max_length": 0}])
def test_no_price_without_a_group_or_a_length(wrong):
    with pytest.raises(ConfigError, match="needs a group and lengths"):
        price(KLConfig(), LossConfig(), **wrong)
