"""Where configurations end: fixed points by enumeration, and the table that says no more than was found."""

import math
from dataclasses import replace

import pytest
import torch

from klamp.config import KLConfig, LossConfig
from klamp.config.loss import configured_price
from klamp.errors import ConfigError
from klamp.verify import convergence
from klamp.verify.convergence import (
    LOSSES,
    REACHED,
    TERMS,
    answer_convergence,
    claims_exact,
    expected_step,
    fit_price,
    follow,
    optimum,
    worlds,
)
from klamp.verify.one_step import Scene, examine_config
from klamp.verify.worlds import enumerate_outcomes, random_chain

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # checked in tests/core; here they would cost minutes

EXACT = LossConfig(loss_type="dr_grpo", advantage_baseline="leave_one_out")
SEQUENCE = KLConfig(beta=0.3, kl_horizon="sequence")


def world_at(seed: int, *, group_size: int = 2) -> Scene:
    chain = random_chain(seed, vocab=3, length=2, eos=0)
    rewards = torch.rand(len(enumerate_outcomes(chain).probs), generator=torch.Generator().manual_seed(seed)).double()
    return Scene(chain=chain, rewards=rewards, group_size=group_size)


@pytest.mark.parametrize("placement", ["loss", "advantage", "reward"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("scale", ["none", "std"])
def test_the_expected_step_is_the_mean_over_all_groups(placement, baseline, loss_type, scale):
    if placement == "reward" and scale == "std":
        pytest.skip("refused: beta drops out")
    world = world_at(4)
    term = {} if placement == "loss" else {"kl_estimator": "k1", "kl_placement": placement}
    kl = KLConfig(beta=0.3, kl_horizon="sequence", **term)
    loss = LossConfig(loss_type=loss_type, scale_rewards=scale, advantage_baseline=baseline)
    found, _ = expected_step(kl, loss, world)
    step = examine_config(kl, loss, scene=world)
    expected = step.policy_gradient + kl.beta * step.kl.gradient
    assert (found - expected).abs().max() < 1e-12
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_an_exact_objective_ends_at_the_optimum_of_its_price(group_size, baseline):
    world = world_at(7, group_size=group_size)
    loss = replace(EXACT, advantage_baseline=baseline)
    end = follow(SEQUENCE, loss, world)
    price = configured_price(SEQUENCE, loss, group_size=group_size, mean_length=1.0, max_length=2).per_completion
    assert end.stands
    assert end.distance < 1e-12
    assert end.price == pytest.approx(price, rel=1e-9)
    assert price == pytest.approx(0.3 * (group_size / (group_size - 1) if baseline == "mean" else 1.0))


def test_another_divisor_of_the_kl_is_another_price():
    world = world_at(3)
    kl = replace(SEQUENCE, kl_normalizer="sequence_sum")
    end = follow(kl, EXACT, world)
    assert end.stands and end.distance < 1e-12
    assert end.price == pytest.approx(0.3 * world.chain.length, rel=1e-9)


def test_the_token_horizon_ends_elsewhere_and_spends_more():
    *_, longest = worlds()
    end = follow(KLConfig(beta=0.2), EXACT, longest)
    assert end.stands
    assert end.distance > 0.05
    assert end.kl > 1.5 * end.optimal_kl


def test_the_nearest_optimum_of_scaled_advantages_has_numbers_of_its_own():
    world = worlds()[-1]
    end = follow(KLConfig(beta=0.2), LossConfig(scale_rewards="std"), world)
    outcomes = enumerate_outcomes(world.chain, unreachable=True)
    ref = outcomes.ref_logprobs.sum(-1)
    best = (ref + world.rewards / end.price).log_softmax(-1)
    lengths = outcomes.mask.sum(-1).double()
    assert end.nearest_kl == pytest.approx(float((best.exp() * (best - ref)).sum()))
    assert end.nearest_length == pytest.approx(float((best.exp() * lengths).sum()))
    assert end.nearest_kl > 2 * end.optimal_kl


def test_k1_as_a_loss_never_stands_still():
    with pytest.warns(match="expected gradient of exactly zero"):
        kl = KLConfig(beta=0.2, kl_estimator="k1", kl_gradient="own")
    assert not follow(kl, EXACT, world_at(1)).stands


def test_a_kl_in_the_reward_is_exact_under_the_completions_own_length_too():
    kl = KLConfig(beta=0.2, kl_estimator="k1", kl_placement="reward", kl_horizon="sequence")
    own_length = LossConfig(loss_type="grpo", scale_rewards="none")
    assert follow(kl, own_length, worlds()[1]).exact
    assert follow(SEQUENCE, own_length, worlds()[1]).distance > 10 * REACHED


def test_tokens_without_a_kl_are_refused_not_passed_over():
    with pytest.raises(ConfigError, match="cannot be followed"):
        follow(KLConfig(beta=0.2, kl_horizon="sequence", kl_exclude_tokens=(1,)), EXACT, world_at(1))


def test_the_optimum_is_the_best_policy():
    ref, rewards = torch.randn(6).double().log_softmax(-1), torch.rand(6).double()
    best = optimum(ref, rewards, 0.4)

    def worth(logprobs: torch.Tensor) -> float:
        return float((logprobs.exp() * (rewards - 0.4 * (logprobs - ref))).sum())

    for seed in range(20):
        other = (best + 0.1 * torch.randn(6, generator=torch.Generator().manual_seed(seed)).double()).log_softmax(-1)
        assert worth(other) < worth(best)


def test_the_best_price_of_an_optimum_is_its_own():
    ref, rewards = torch.randn(6).double().log_softmax(-1), torch.rand(6).double()
    for price in (0.05, 0.5, 5.0):
        assert fit_price(optimum(ref, rewards, price), ref, rewards) == pytest.approx(price, rel=1e-6)
    assert math.isinf(fit_price(optimum(ref, -rewards, 0.5), ref, rewards))


@pytest.mark.slow
def test_every_claim_holds(monkeypatch):
    small = worlds()[:2]  # the command counts 6 tokens too
    monkeypatch.setattr(convergence, "worlds", lambda: small)
    convergence.ends.cache_clear()
    answer = answer_convergence()
    assert [check.claim for check in answer.checks if not check.passed] == []
    assert len(answer.checks) > 40
    rows = {row[0]: row[1:] for row in answer.tables[0].rows}
    assert rows["reward, k1"] == ("exact", "exact", "exact", "refused")
    assert rows["loss, k3, sequence"][:2] == ("exact", "exact")
    assert rows["loss, k1, gradient own"][0] == "runs away"
    assert set(rows) == set(TERMS)
    convergence.ends.cache_clear()


@pytest.mark.slow
def test_what_is_claimed_to_be_exact():
    exact = {(term, loss) for term, kl in TERMS.items() for loss, of in LOSSES.items() if claims_exact(kl, of)}
    in_reward = {("reward, k1", loss) for loss in LOSSES if "std" not in loss}
    over_sequences = {
        (term, loss)
        for term in ("loss, k3, sequence", "loss, k1, sequence", "loss, exact, sequence", "advantage, k1, sequence")
        for loss in ("fixed length", "token mean")
    }
    assert exact == in_reward | over_sequences
