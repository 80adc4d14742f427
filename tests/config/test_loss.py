"""The objective that a KL and a loss configuration describe together."""

import warnings
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from klamp.config import LOSS_TYPES, KLConfig, LossConfig, build_objective
from klamp.config.loss import divisor, kl_reduction
from klamp.core.masking import reduce_tokens
from klamp.core.types import Reduction
from klamp.errors import ConfigError, KLWarning

IN_REWARD = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}


def test_the_kl_in_the_reward_is_refused_with_std_scaled_advantages():
    kl = KLConfig(**IN_REWARD, beta=0.1)
    with pytest.raises(ConfigError, match="divided by the group's std"):
        build_objective(kl, LossConfig(loss_type="grpo"), max_length=8)
    build_objective(kl, LossConfig(loss_type="grpo", scale_rewards="none"), max_length=8)
    build_objective(kl, LossConfig(loss_type="dr_grpo"), max_length=8)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_loss_type_fixes_reduction_and_scaling(loss_type):
    loss = LossConfig(loss_type=loss_type, epsilon=0.1)
    objective = build_objective(KLConfig(beta=0.3), loss, max_length=8)
    expected = {"grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "fixed_length", "dapo": "token_mean"}
    assert objective.reduction == expected[loss_type]
    assert loss.scale == ("none" if loss_type == "dr_grpo" else "std")
    assert (objective.beta, objective.clip_low, objective.clip_high, objective.max_length) == (0.3, 0.1, 0.1, 8)


@pytest.mark.parametrize(
    ("kl", "reduction"),
    [
        ({}, "token_mean"),
        ({"kl_normalizer": "sequence_sum"}, "sequence_sum"),
        ({"kl_estimator": "k1", "kl_placement": "advantage", "kl_normalizer": "sequence_sum"}, "token_mean"),
    ],
)
def test_a_reduction_of_its_own_is_one_of_the_kl_in_the_loss(kl, reduction):
    assert kl_reduction(KLConfig(**kl), LossConfig(loss_type="dapo")) == reduction


@given(reduction=st.sampled_from(get_args(Reduction)), length=st.integers(1, 9), spare=st.integers(0, 5))
def test_a_divisor_is_what_klamps_own_reduction_divides_by(reduction, length, spare):
    """Three completions of one length in which every token is 1: the reduced number is length / divisor."""
    mask = torch.arange(length + spare).expand(3, -1) < length
    reduced = reduce_tokens(torch.ones(3, length + spare), mask, reduction, length=length + spare).item()
    assert reduced == pytest.approx(length / divisor(reduction, mean_length=length, max_length=length + spare))
    assert divisor("fixed_length", mean_length=length) == length


@pytest.mark.parametrize("bound", ["epsilon", "epsilon_high"])
def test_a_ratio_bound_of_a_loss_without_a_ratio_is_warned_of(bound):
    with pytest.warns(KLWarning, match=f"{bound}=0.3 has no effect: it needs surrogate='ppo_clip'"):
        LossConfig(surrogate="score_function", **{bound: 0.3})
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLWarning)
        LossConfig(surrogate="cispo", **{bound: 0.3})
        LossConfig(surrogate="score_function")
