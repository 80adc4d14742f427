"""The KL as a shift of advantages or rewards: the same numbers as the loss with that placement."""

from __future__ import annotations

import math

import pytest
import torch
from tests.hosts.tinker.fakes import slopes

from klamp import KLConfig
from klamp.errors import ConfigError, DataError, NonFiniteError, ShapeError, UnknownNameError
from klamp.tinker import build_datum, compute_grpo_kl_loss, penalize_rewards, shift_advantages

pytest.importorskip("tinker")

LENGTHS = (4, 2, 5, 1)


def advantage(**changes):
    return KLConfig(
        **{"beta": 0.3, "kl_estimator": "k1", "kl_placement": "advantage", "kl_horizon": "sequence"} | changes
    )


def reward(**changes):
    return advantage(kl_placement="reward", **changes)


def numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [(-0.1 - 2 * torch.rand(2, n, generator=generator)).tolist() for n in LENGTHS]
    return [row[0] for row in rows], [row[1] for row in rows], torch.randn(4, generator=generator).tolist()


def datums(**changes):
    sampler, ref, advantages = numbers()
    return [
        build_datum([1, 2, 3], list(range(len(s))), a, s, r, **changes)
        for s, r, a in zip(sampler, ref, advantages, strict=True)
    ]


def advantages_of(data):
    return [datum.loss_fn_inputs["advantages"].to_torch().tolist() for datum in data]


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_the_shift_is_beta_times_the_log_ratio(horizon):
    sampler, ref, advantages = numbers()
    shifted = advantages_of(shift_advantages(datums(), advantage(kl_horizon=horizon)))
    for found, s, r, a in zip(shifted, sampler, ref, advantages, strict=True):
        delta = [x - y for x, y in zip(s, r, strict=True)]
        spent = delta if horizon == "token" else [sum(delta[t:]) for t in range(len(delta))]
        assert found == pytest.approx([0, 0, *(a - 0.3 * x for x in spent)], abs=1e-6)


def test_with_the_batchs_mean_as_baseline_it_is_the_cookbooks_penalty():
    """A + coef (mean over tokens of d - d), d = log sampler - log ref: tinker_cookbook's incorporate_kl_penalty."""
    sampler, ref, advantages = numbers()
    delta = [[x - y for x, y in zip(s, r, strict=True)] for s, r in zip(sampler, ref, strict=True)]
    mean = sum(map(sum, delta)) / sum(LENGTHS)
    shifted = advantages_of(shift_advantages(datums(), advantage(kl_horizon="token"), baseline="batch"))
    for found, row, a in zip(shifted, delta, advantages, strict=True):
        assert found == pytest.approx([0, 0, *(a + 0.3 * (mean - d) for d in row)], abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_horizon": "token"},
        {"kl_max_log_ratio": 0.2},
        {"kl_clip_method": "hard", "kl_clip_threshold": 0.05, "kl_reference_length": 3},
    ],
)
def test_shifted_datums_give_the_loss_of_the_placement(changes):
    """At the sampler's own weights, where the clip's gate sees the same KL before and inside the loss."""
    kl, data = advantage(**changes), datums()
    policies = [datum.loss_fn_inputs["logprobs"].to_torch().clone().requires_grad_(True) for datum in data]
    expected, _ = compute_grpo_kl_loss(data, policies, kl=kl, group_size=2)
    shifted = shift_advantages(data, kl, group_size=2)
    loss, _ = compute_grpo_kl_loss(shifted, policies, kl_coef=0.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(slopes(loss, policies), slopes(expected, policies), rtol=1e-6, atol=1e-8)


def test_excluded_tokens_shift_nothing():
    sampler, ref, advantages = numbers()
    data = [
        build_datum([1, 2, 3], list(range(len(s))), a, s, r, kl_mask=[0] + [1] * (len(s) - 1))
        for s, r, a in zip(sampler, ref, advantages, strict=True)
    ]
    shifted = advantages_of(shift_advantages(data, advantage(kl_horizon="token", kl_exclude_tokens=("special",))))
    assert [row[2] for row in shifted] == pytest.approx(advantages, abs=1e-6)
    assert shifted[0][3] == pytest.approx(advantages[0] - 0.3 * (sampler[0][1] - ref[0][1]), abs=1e-6)


def test_a_controllers_value_and_nothing_at_0():
    twice = advantages_of(shift_advantages(datums(), advantage(), beta=0.6))
    assert twice == advantages_of(shift_advantages(datums(), advantage(beta=0.6)))
    data = datums()
    assert all(new is old for new, old in zip(shift_advantages(data, advantage(), beta=0.0), data, strict=True))


def test_rewards_lose_beta_times_the_sum_of_the_log_ratios():
    sampler, ref, rewards = numbers()
    found = penalize_rewards(rewards, sampler, ref, reward())
    assert found == pytest.approx(
        [r - 0.3 * (sum(s) - sum(q)) for r, s, q in zip(rewards, sampler, ref, strict=True)], abs=1e-5
    )
    masks = [[1] + [0] * (n - 1) for n in LENGTHS]
    first = penalize_rewards(rewards, sampler, ref, reward(), beta=1.0, kl_masks=masks)
    assert first == pytest.approx([r - (s[0] - q[0]) for r, s, q in zip(rewards, sampler, ref, strict=True)], abs=1e-5)


def test_a_clip_of_rewards_is_refused():
    """Its gate has to come after a baseline that is not formed yet."""
    sampler, ref, rewards = numbers()
    with pytest.raises(ConfigError, match="cannot clip the KL") as caught:
        penalize_rewards(rewards, sampler, ref, reward(kl_clip_method="hard", use_per_token_kl_threshold=False))
    assert "shift_advantages" in caught.value.fix


def test_refusals():
    sampler, ref, rewards = numbers()
    with pytest.raises(ConfigError, match="shift_advantages is for kl_placement='advantage'"):
        shift_advantages(datums(), KLConfig(beta=0.3))
    with pytest.raises(ConfigError, match="penalize_rewards is for kl_placement='reward'"):
        penalize_rewards(rewards, sampler, ref, advantage())
    with pytest.raises(UnknownNameError, match="unknown baseline"):
        shift_advantages(datums(), advantage(), baseline="group")
    with pytest.raises(DataError, match="datum 0 has no 'ref_logprobs'"):
        shift_advantages([build_datum([1], [2], 1.0, [-1.0])], advantage())
    with pytest.raises(ShapeError, match="ref_logprobs and logprobs have different lengths"):
        penalize_rewards(rewards, sampler, [row[:-1] for row in ref], reward())
    with pytest.raises(ShapeError, match="one reward per response"):
        penalize_rewards(rewards[:-1], sampler, ref, reward())
    with pytest.raises(NonFiniteError, match="response 2: ref_logprobs"):
        penalize_rewards(rewards, sampler, [*ref[:2], [math.nan] * 5, ref[3]], reward())
