"""Where configurations end, by enumeration; the proofs of a second anchor, which fail where their part is broken."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tests.verify.test_proofs import failures

from klamp.config import KLConfig, LossConfig
from klamp.core import term, topk
from klamp.core.term import scored_by
from klamp.core.topk import topk_kl
from klamp.errors import ConfigError
from klamp.verify import convergence, one_step
from klamp.verify.convergence import LOSSES, TERMS, expected_step, follow, optimum, worlds
from klamp.verify.one_step import Scene, examine_config, scene, scores_of
from klamp.verify.oracle import gradient_of, local_kl, name_gradient, truths
from klamp.verify.proofs import anchors
from klamp.verify.proofs.anchors import as_loss, prove_noise, prove_teacher, prove_wrong_forms, proximal, taught_by
from klamp.verify.worlds import enumerate_outcomes, one_position, random_chain

EXACT = LossConfig(loss_type="dr_grpo", advantage_baseline="leave_one_out")


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
        assert convergence.fit_price(optimum(ref, rewards, price), ref, rewards) == pytest.approx(price, rel=1e-6)
    assert math.isinf(convergence.fit_price(optimum(ref, -rewards, 0.5), ref, rewards))


@pytest.mark.slow
def test_every_claim_holds(monkeypatch):
    small = worlds()[:2]  # the command counts 6 tokens too
    monkeypatch.setattr(convergence, "worlds", lambda: small)
    convergence.ends.cache_clear()
    answer = convergence.answer_convergence()
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
    pairs = itertools.product(TERMS, LOSSES)
    exact = {(term, loss) for term, loss in pairs if convergence.claims_exact(TERMS[term], LOSSES[loss])}
    in_reward = {("reward, k1", loss) for loss in LOSSES if "std" not in loss}
    over_sequences = {
        (term, loss)
        for term in ("loss, k3, sequence", "loss, k1, sequence", "loss, exact, sequence", "advantage, k1, sequence")
        for loss in ("fixed length", "token mean")
    }
    assert exact == in_reward | over_sequences


FIXED = LOSSES["fixed length"]
PAIRS: dict[str, tuple[dict, dict]] = {
    "loss, k3; loss, k1": ({}, {}),
    "loss, exact; loss, a head of 1": ({"kl_estimator": "exact"}, {"estimator": "topk", "top_k": 1}),
    "loss, k3; advantage, k1": ({}, {"placement": "advantage"}),
    "reward, k1; reward, k1": ({"kl_estimator": "k1", "kl_placement": "reward"}, {"placement": "reward"}),
}


def test_without_a_teacher_of_its_own_a_chain_s_reference_is_the_teacher():
    chain = random_chain(0)
    assert torch.equal(replace(chain, teacher_logits=None).logits("teacher"), chain.ref_logits)
    taught = chain.towards("teacher")
    assert torch.equal(taught.ref_logits, chain.teacher_logits) and not torch.equal(taught.ref_logits, chain.ref_logits)
    y = enumerate_outcomes(chain)
    assert torch.equal(enumerate_outcomes(taught).ref_logprobs, y.teacher_logprobs)
    assert torch.equal(taught.towards("policy").ref_logits, chain.policy_logits)
    alone = one_position(*(torch.tensor([1.0, 2.0]),) * 2, teacher_logits=torch.tensor([0.0, 1.0]))
    assert alone.logits("teacher").tolist() == [[0.0, 1.0]]


def test_the_mean_of_two_divergences_lies_below_half_of_each():
    chain = random_chain(0, length=2)
    js, reverse, forward = (local_kl(chain, direction=each) for each in ("js", "reverse", "forward"))
    assert 0 < js < min(reverse, forward) / 2
    own = replace(chain, ref_logits=chain.policy_logits)
    assert gradient_of(local_kl(own, direction="js"), own).abs().max() < 1e-15


def test_a_step_tells_the_teacher_from_the_reference():
    world = scene(0, length=2)
    one = examine_config(KLConfig(beta=0.3), scene=world, teacher=taught_by(coef=0.5))
    other = examine_config(KLConfig(beta=0.0), scene=world, teacher=taught_by(coef=2.0))
    torch.testing.assert_close(one.kl.gradient, other.kl.gradient)
    assert one.kl.follows.is_exactly("local") and abs(one.kl.value_bias) < 1e-12
    towards_ref = name_gradient([one.kl.gradient], [truths(world.chain)])
    assert towards_ref.name == "none of these"
    both = examine_config(KLConfig(beta=0.3), scene=world)
    assert both.kl.follows.is_exactly("local")


def test_a_teacher_in_the_reward_beside_a_reference_in_the_reward():
    in_reward = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
    teacher = taught_by(coef=0.5, placement="reward", horizon="sequence")
    for baseline in ("leave_one_out", "mean"):
        loss = LossConfig(scale_rewards="none", loss_type="dr_grpo", advantage_baseline=baseline)
        world = scene(0, length=2, rewards="mixed")
        report = examine_config(KLConfig(beta=0.3, **in_reward), loss, scene=world, teacher=teacher)
        factor = 0.5 if baseline == "leave_one_out" else 0.25
        assert report.kl.follows.is_exactly("reverse", factor=factor)


def claims(kind: str, found: list[str]) -> list[str]:
    return [each for each in found if kind in each]


def test_a_constant_in_head_and_tail_passes_every_test_of_means_and_not_that_of_the_noise(monkeypatch):
    own = topk._terms

    def with_constant(name, log_p, log_q):
        value, slope = own(name, log_p, log_q)
        return value, slope + log_p.exp()

    monkeypatch.setattr(topk, "_terms", with_constant)
    assert failures(prove_teacher) == []
    found = failures(prove_noise)
    assert [len(claims(f"{x}, at the teacher", found)) for x in ("reverse", "forward", "js")] == [3, 3, 3]


def with_weight_left_out(*args, log_weight, **choices):
    return topk_kl(*args, log_weight=None, **choices)


def with_tail_inverted(*heads, **choices):
    return topk_kl(*heads[:4], ~heads[4], **choices)


def with_other_direction(*args, direction, **choices):
    return topk_kl(*args, direction="forward" if direction == "reverse" else direction, **choices)


def with_reference_as_teacher(y, *args):
    return scores_of(y, *args) | {"teacher.logprobs": y.ref_logprobs}


def with_reference_as_sampler(batch, to):
    return scored_by(batch, "reference" if to == "sampler" else to)


@pytest.mark.parametrize(
    ("module", "name", "broken", "words"),
    [
        (one_step, "topk_kl", with_weight_left_out, ("a head of 0 to 4", "another sampler, at its prefixes")),
        (one_step, "topk_kl", with_tail_inverted, ("a head of 0 to 4", "tokens of the policy")),
        (one_step, "topk_kl", with_other_direction, ("a head of 0 to 4", "reverse, horizon token")),
        (one_step, "scores_of", with_reference_as_teacher, ("in the advantage, k1, token", "in the reward, k1")),
        (term, "scored_by", with_reference_as_sampler, ("to the sampler",)),
    ],
)
def test_a_head_a_teacher_or_a_sampler_that_is_read_wrongly(module, name, broken, words, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    found = failures(prove_teacher)
    assert all(claims(each, found) for each in words)
    assert name != "topk_kl" or not (claims("exact", found) or claims("k1", found))


def test_every_wrong_form_is_told_from_klamp_s_own(monkeypatch):
    """Where the wrong form is repaired, its row fails: a weight of the sampler's for the one that was left out."""
    weighted = as_loss(taught_by(estimator="topk", head="teacher", top_k=1, off_policy="token"))
    monkeypatch.setattr(anchors, "as_loss", lambda teacher: weighted)
    found = failures(prove_wrong_forms)
    assert claims("tail without its weight, another", found) and claims("no tail", found)


@pytest.mark.parametrize("horizon", ["sequence", "token"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_expected_step_with_a_teacher_is_the_mean_over_all_groups(pair, horizon):
    """Against `one_step`, which takes klamp's step in every single group, with the teacher as a term of its own."""
    if horizon == "token" and "reward" in pair:
        pytest.skip("refused: a reward belongs to the whole completion")
    world = scene(0, length=2, rewards="mixed")
    kl, teacher = KLConfig(beta=0.2, kl_horizon=horizon, **PAIRS[pair][0]), {"horizon": horizon, **PAIRS[pair][1]}
    taught = taught_by(coef=0.3, **teacher)
    for loss in (FIXED, LossConfig(loss_type="grpo", scale_rewards="none")):
        alone, beside = examine_config(kl, loss, scene=world), examine_config(kl, loss, scene=world, teacher=taught)
        expected = alone.policy_gradient + 0.2 * alone.kl.gradient + 0.3 * beside.kl.gradient
        torch.testing.assert_close(beside.policy_gradient, alone.policy_gradient + 0.2 * alone.kl.gradient)
        step, _ = expected_step(kl, loss, world, taught)
        assert (step - expected).abs().max() < 1e-12


def test_two_anchors_of_a_group_s_mean_cost_more_by_the_same_factor():
    world, loss = worlds()[0], replace(FIXED, advantage_baseline="mean")
    end = follow(KLConfig(beta=0.2), loss, world, taught_by(coef=0.3))
    assert end.exact and end.price == pytest.approx(1.0)
    assert convergence.teacher_price(taught_by(coef=0.3), loss, group_size=2).per_completion == pytest.approx(0.6)
    assert convergence.teacher_price(taught_by(coef=0.3), LossConfig(scale_rewards="std"), group_size=2).scaled


def test_one_anchor_ends_at_the_teacher_and_the_sampler_holds_to_nothing():
    three = worlds()[1]
    for direction in ("reverse", "forward", "js"):
        taught = taught_by(direction=direction, estimator="topk", top_k=1)
        assert follow(KLConfig(beta=0.0), FIXED, Scene(chain=three.chain), taught).exact
    start = replace(three, chain=replace(three.chain, teacher_logits=three.chain.ref_logits))
    assert follow(proximal(0.3), FIXED, start, taught_by(coef=0.2, horizon="sequence")).exact
