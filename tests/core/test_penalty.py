"""What the KL term does to a batch, and to which sequences: the parts that a trainer with a loss of its own uses."""

from dataclasses import replace

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, read
from tests.core.test_estimators import double
from tests.core.test_objective import loss_and_slope, random_batch

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import log_weights
from klamp.core.masking import reduce_tokens
from klamp.core.objective import grpo_loss
from klamp.core.penalty import advantages_with_kl, kl_metrics, shifted_advantages, token_penalty
from klamp.core.surrogates import score_function
from klamp.core.term import KLTerm, measure, prepare
from klamp.errors import ConfigError, DataError
from klamp.verify.oracle import examine, truths
from klamp.verify.worlds import random_chain

TERMS = [
    KLTerm(),
    KLTerm(value="k1", horizon="sequence"),
    KLTerm(value="k3", gradient="own"),
    KLTerm(gradient="forward", horizon="sequence"),
    KLTerm(off_policy="sequence", horizon="sequence"),
    KLTerm(value="exact"),
    KLTerm(clip_method="hard", clip_threshold=0.3, clip_unit="sequence"),
    KLTerm(clip_method="soft", clip_threshold=0.3, clip_unit="sequence", clip_temperature=0.1),
]


def batch_for(term, seed=0):
    batch = random_batch(seed)
    return changed(batch, exact_kl=batch.policy_logprobs**2) if term.value == "exact" else batch


@pytest.mark.parametrize("term", TERMS, ids=str)
@pytest.mark.parametrize(
    ("reduction", "normalizer"),
    [("token_mean", None), ("sequence_mean", "sequence_sum"), ("fixed_length", None), ("fixed_length", "sequence_sum")],
)
def test_grpo_loss_is_the_surrogate_plus_beta_times_the_reduced_penalty(term, reduction, normalizer):
    batch, term = batch_for(term), replace(term, normalizer=normalizer)
    whole, slope = loss_and_slope(batch_for(term), objective_of(reduction=reduction, max_length=8, beta=0.3, kl=term))
    without, slope_without = loss_and_slope(batch_for(term), objective_of(reduction=reduction, max_length=8))
    penalty = reduce_tokens(token_penalty(prepare(batch, term)), batch.mask, normalizer or reduction, length=8)
    (pull,) = torch.autograd.grad(penalty, batch.policy_logprobs)
    torch.testing.assert_close(whole, without + 0.3 * penalty.detach())
    torch.testing.assert_close(slope, slope_without + 0.3 * pull)


@pytest.mark.parametrize("term", TERMS, ids=str)
def test_a_weight_multiplies_the_kl_of_its_sequence(term):
    batch = batch_for(term)
    plain = token_penalty(prepare(batch, term))
    weight = torch.tensor([2.0, 1.0, 0.5, 3.0], dtype=torch.float64)
    weighted = token_penalty(prepare(changed(batch, kl_weight=weight), term))
    torch.testing.assert_close(weighted, plain * weight[:, None])
    (slope,) = torch.autograd.grad((weighted * 0.7).sum(), batch.policy_logprobs, retain_graph=True)
    (expected,) = torch.autograd.grad((plain * weight[:, None] * 0.7).sum(), batch.policy_logprobs)
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_what_a_bound_cuts_off_is_logged_where_there_is_one(horizon):
    kl_mask = torch.ones(4, 5, dtype=torch.bool)
    kl_mask[:, 1] = False
    batch, off_policy = random_batch(kl_mask=kl_mask), "sequence" if horizon == "sequence" else "token"
    seen = kl_metrics(measure(batch, KLTerm(off_policy=off_policy, horizon=horizon, max_weight=1.5, max_log_ratio=0.4)))
    policy, both = batch.policy_logprobs, batch.mask & kl_mask
    weights = log_weights(policy, read(batch, "sampler_logprobs"), batch.mask, horizon=horizon).exp()
    truncated = (weights > 1.5)[batch.mask].sum() / batch.mask.sum()
    clamped = ((policy - read(batch, "ref_logprobs")).abs() > 0.4)[both].sum() / both.sum()
    assert 0 < truncated < 1 and 0 < clamped < 1
    assert measure(batch, KLTerm(max_log_ratio=0.4)).bounded.aminmax() == (-0.4, 0.4)
    assert (seen["kl/weights_truncated"], seen["kl/log_ratio_clamped"]) == (truncated, clamped)
    unbounded = kl_metrics(measure(batch, KLTerm(off_policy=off_policy, horizon=horizon)))
    assert {"kl/weights_truncated", "kl/log_ratio_clamped"}.isdisjoint(unbounded)


@pytest.mark.parametrize("weight", [[1.0, -1.0, 1.0, 0.0], [float("nan")] * 4, [float("inf"), 1.0, 0.5, 1.0]])
def test_a_weight_that_is_negative_or_nan_is_refused(weight):
    with pytest.raises(DataError, match="the weights of an anchor"):
        grpo_loss(random_batch(kl_weight=torch.tensor(weight).double()), objective_of(beta=0.1))


def centred(x):
    return (x.view(2, 2) - x.view(2, 2).flip(-1)).view(-1)


def test_rewards_are_shifted_by_the_summed_k1_times_weight_and_the_gate_comes_after_the_baseline():
    batch, term = random_batch(kl_weight=torch.tensor([1.0, 2.0, 0.0, 1.0])), KLTerm(placement="reward")
    bare = prepare(batch, term)
    clipped = prepare(batch, replace(term, clip_method="hard", clip_threshold=0.93, clip_unit="sequence"))
    gate = clipped.gate
    assert gate is not None
    assert 0 < gate.factor.sum() < 4, "a gate that is open for some only"
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    delta = (batch.policy_logprobs - read(batch, "ref_logprobs")).detach()
    k1 = (delta * batch.mask).sum(-1) * read(batch, "kl_weight")
    shifted = advantages_with_kl(rewards, measure(batch, term), beta=0.2, advantages=lambda x: x)
    torch.testing.assert_close(shifted, rewards - 0.2 * k1)
    assert not shifted.requires_grad

    free, gated = (advantages_with_kl(rewards, each, beta=0.2, advantages=centred) for each in (bare, clipped))
    torch.testing.assert_close(free, centred(rewards - 0.2 * k1))
    torch.testing.assert_close(gated, centred(rewards) - 0.2 * gate.factor * centred(k1))


def test_without_a_reference_every_part_says_so():
    batch, term = random_batch(ref_logprobs=None), KLTerm()
    for part in (
        lambda: token_penalty(prepare(batch, term)),
        lambda: shifted_advantages(batch.advantages, prepare(batch, replace(term, placement="advantage")), beta=0.1),
        lambda: advantages_with_kl(torch.ones(4), measure(batch, term), beta=0.1, advantages=centred),
    ):
        with pytest.raises(ConfigError, match="reference"):
            part()


def shifted(advantages, policy, ref, mask, *, beta, kl_mask=None, **choices):
    batch = flat_batch(policy_logprobs=policy, ref_logprobs=ref, mask=mask, kl_mask=kl_mask, advantages=advantages)
    return shifted_advantages(advantages, prepare(batch, KLTerm(placement="advantage", **choices)), beta=beta)


def test_the_advantage_loses_the_log_ratio_of_its_token_or_of_all_that_follow():
    policy, ref = double([[-1.0, -2.0, -3.0, 9.0]]).requires_grad_(True), double([[-2.0, -1.5, -5.0, 1.0]])
    mask = torch.tensor([[True, True, True, False]])
    token = shifted(double([1.0]), policy, ref, mask, beta=0.1, horizon="token")
    sequence = shifted(double([1.0]), policy, ref, mask, beta=0.1, horizon="sequence")
    assert not token.requires_grad
    assert token[0, :3].tolist() == pytest.approx([1 - 0.1, 1 + 0.05, 1 - 0.2])
    assert sequence[0, :3].tolist() == pytest.approx([1 - 0.1 * 2.5, 1 - 0.1 * 1.5, 1 - 0.1 * 2.0])


@pytest.mark.parametrize("beta", [0.04, 2.0])
@pytest.mark.parametrize(("horizon", "name"), [("token", "local"), ("sequence", "reverse")])
def test_in_the_advantage_the_kl_keeps_its_beta_and_has_the_gradient_of_its_horizon(beta, horizon, name):
    chain = random_chain(5, vocab=3, length=4)

    def loss(y):
        logprobs = y.policy_logprobs, y.ref_logprobs
        advantages = shifted(torch.zeros_like(y.probs), *logprobs, y.mask, beta=beta, horizon=horizon)
        return score_function(y.policy_logprobs, y.sampler_logprobs, advantages)

    report = examine(chain, loss)
    assert torch.allclose(report.gradient, beta * truths(chain)[name], rtol=0, atol=1e-13)


def test_where_tokens_are_left_out_later_ones_count_by_k3_in_the_advantage_as_in_the_loss():
    policy, ref = double([[-1.0, -2.0, -1.5]]).requires_grad_(True), double([[-1.2, -1.5, -2.5]])
    mask, kept = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
    later = ESTIMATORS["k3"].value(double(1.0)).item()
    wanted = [0.2 + later, later, 1.0]
    shift = shifted(double([0.0]), policy, ref, mask, beta=-1.0, kl_mask=kept, horizon="sequence")
    assert shift[0].tolist() == pytest.approx(wanted)
    batch = flat_batch(policy_logprobs=policy, ref_logprobs=ref, mask=mask, kl_mask=kept, advantages=double([0.0]))
    (slope,) = torch.autograd.grad(token_penalty(prepare(batch, KLTerm(value="k1", horizon="sequence"))).sum(), policy)
    assert slope[0].tolist() == pytest.approx(wanted)
