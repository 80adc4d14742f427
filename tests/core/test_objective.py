"""grpo_loss: the surrogate's gradient plus beta times the named KL's, for a whole batch or in micro-batches."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, read

from klamp.core.estimators import exact_kl
from klamp.core.masking import reduce_tokens
from klamp.core.objective import grpo_loss
from klamp.core.surrogates import ppo_clip
from klamp.core.term import KLTerm
from klamp.errors import KlampError
from klamp.verify.oracle import examine
from klamp.verify.worlds import prefix_probs, random_chain

POISONS = (float("nan"), float("inf"), -float("inf"))
ROWS, TOKENS = 4, 5


def random_batch(seed=0, *, dtype=torch.float64, **changes):
    generator = torch.Generator().manual_seed(seed)
    policy, old, ref, sampler = (
        (-0.05 - 2 * torch.rand(ROWS, TOKENS, generator=generator)).to(dtype) for _ in range(4)
    )
    mask = torch.rand(ROWS, TOKENS, generator=generator) > 0.35
    mask[:, 0] = True
    columns = {
        "policy_logprobs": policy.requires_grad_(True),
        "mask": mask,
        "advantages": torch.randn(ROWS, generator=generator).to(dtype),
        "old_logprobs": policy.detach() + 0.3 * (old - policy.detach()),
        "ref_logprobs": ref,
        "sampler_logprobs": sampler,
        "group_size": 2,
    }
    return flat_batch(**columns | changes)


def loss_and_slope(batch, objective, **kwargs):
    output = grpo_loss(batch, objective, **kwargs)
    (slope,) = torch.autograd.grad(output.loss, batch.policy_logprobs)
    return output.loss.detach(), slope


def kl_only(term, *, beta=1.0, skip=0):
    """The KL part of grpo_loss, one completion at a time, as a loss for the oracle; `skip` tokens carry no KL."""
    objective = objective_of(surrogate="score_function", reduction="sequence_sum", beta=beta, kl=term)

    def loss(y):
        reverse = exact_kl(y.policy_logits, y.ref_logits)
        forward = exact_kl(y.policy_logits, y.ref_logits, direction="forward")
        losses = []
        for n in range(len(y.probs)):
            row = slice(n, n + 1)
            batch = flat_batch(
                policy_logprobs=y.policy_logprobs[row],
                mask=y.mask[row],
                kl_mask=torch.arange(y.mask.shape[1])[None] >= skip,
                advantages=torch.zeros(1, dtype=torch.float64),
                ref_logprobs=y.ref_logprobs[row],
                sampler_logprobs=y.sampler_logprobs[row],
                exact_kl=reverse[row],
                exact_kl_forward=forward[row],
            )
            losses.append(grpo_loss(batch, objective).loss)
        return torch.stack(losses)

    return loss


@pytest.mark.parametrize("value", ["k1", "k3", "exact"])
@pytest.mark.parametrize(
    ("sampler", "off_policy", "horizon", "name"),
    [
        ("policy", "none", "token", "local"),
        ("policy", "none", "sequence", "reverse"),
        ("other", "sequence", "sequence", "reverse"),
        ("other", "sequence", "token", "local"),
        ("other", "token", "token", "local_sampled"),
    ],
)
def test_horizon_and_ratio_decide_whose_prefixes_count_and_which_gradient(value, sampler, off_policy, horizon, name):
    chain = random_chain(1, vocab=3, length=3, sampler=sampler)
    report = examine(chain, kl_only(KLTerm(value=value, horizon=horizon, off_policy=off_policy)))
    assert report.follows.is_exactly(name)
    assert off_policy == "token" or report.value_bias == pytest.approx(0.0, abs=1e-12)


def kl_after_the_first_token(chain, *, frozen):
    """sum_s P(s) KL_s over the prefixes that hold a token already, with P frozen or not."""
    log_p, log_q = chain.logprobs("policy"), chain.logprobs("ref")
    probs = prefix_probs(chain, "policy")
    probs = probs.detach() if frozen else probs
    return (probs[1:] * (log_p.exp() * (log_p - log_q)).sum(-1)[1:]).sum()


@pytest.mark.parametrize("value", ["k3", "exact"])
@pytest.mark.parametrize("off_policy", ["none", "sequence"])
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_tokens_without_a_kl_still_count_in_the_prefix_and_still_cause_the_kl_of_later_ones(value, off_policy, horizon):
    chain = random_chain(7, vocab=3, length=3, sampler="policy" if off_policy == "none" else "other")
    truth = kl_after_the_first_token(chain, frozen=horizon == "token")
    (gradient,) = torch.autograd.grad(truth, chain.policy_logits)
    report = examine(chain, kl_only(KLTerm(value=value, horizon=horizon, off_policy=off_policy), skip=1))
    assert report.value == pytest.approx(truth.item(), abs=1e-12)
    assert torch.allclose(report.gradient, gradient, rtol=0, atol=1e-12)


def test_with_beta_zero_no_reference_is_needed_and_the_kl_leaves_no_trace():
    batch = random_batch(2, ref_logprobs=None, sampler_logprobs=None)
    surrogate = ppo_clip(batch.policy_logprobs, batch.old_logprobs, batch.advantages)
    by_hand = reduce_tokens(surrogate, batch.mask, "sequence_mean")
    assert loss_and_slope(batch, objective_of())[0].item() == pytest.approx(by_hand.item(), abs=1e-14)


def test_placed_in_the_reward_the_loss_adds_no_second_kl():
    batch = random_batch(3)
    with_kl = loss_and_slope(batch, objective_of(beta=0.5, kl=KLTerm(value="k1", placement="reward")))
    without = loss_and_slope(batch, objective_of())
    assert with_kl[0] == without[0]
    assert torch.equal(with_kl[1], without[1])
    priced = objective_of(beta=0.5, kl=KLTerm(value="k1", placement="reward"))
    assert "kl/k3" in grpo_loss(batch, priced).metrics
    assert "kl/k3" not in grpo_loss(changed(batch, ref_logprobs=None), priced).metrics, "it is in the reward already"


def test_metrics_are_detached_scalars_that_say_what_the_loss_is_made_of():
    batch = random_batch(5)
    output = grpo_loss(batch, objective_of(beta=0.3))
    assert all(not m.requires_grad and m.ndim == 0 for m in output.metrics.values())
    parts = output.metrics["train/policy_loss"] + output.metrics["train/kl_penalty"]
    assert parts.item() == pytest.approx(output.loss.item(), abs=1e-14)
    delta = (batch.policy_logprobs - read(batch, "ref_logprobs")).detach()
    k3 = (torch.exp(-delta) - 1 + delta)[batch.mask].mean()
    assert output.metrics["kl/k1"].item() == pytest.approx(delta[batch.mask].mean().item(), abs=1e-14)
    assert output.metrics["kl/k3"].item() == pytest.approx(k3.item(), abs=1e-14)


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.05, 0.4)])
def test_the_share_of_clipped_ratios_is_that_of_the_trained_tokens_without_a_policy_gradient(bounds):
    objective = objective_of(clip_low=bounds[0], clip_high=bounds[1], beta=0.7, kl=KLTerm(placement="advantage"))
    for changes in ({}, {"old_logprobs": None}):
        batch = random_batch(5, **changes)
        _, slope = loss_and_slope(batch, objective)
        silent = (slope == 0)[batch.mask]
        assert bool(silent.any()) == (not changes), "on policy every ratio is 1"
        found = grpo_loss(batch, objective).metrics["policy/ratio_clipped"].item()
        assert found == pytest.approx(silent.double().mean().item(), abs=1e-7)


@pytest.mark.parametrize(("placement", "value"), [("loss", "k3"), ("advantage", "k1")])
def test_a_soft_gate_scales_each_sequences_kl_gradient_by_its_sigmoid(placement, value):
    gate_kl = torch.tensor([0.0, 0.4, 0.6, 3.0], dtype=torch.float64)
    batch = random_batch(6, gate_kl=gate_kl)
    choices = {"surrogate": "score_function", "reduction": "sequence_sum", "beta": 1.0}
    batch = replace(batch, advantages=torch.zeros(ROWS, dtype=torch.float64))
    clip = {"clip_method": "soft", "clip_threshold": 0.5, "clip_temperature": 0.1, "clip_unit": "sequence"}
    term = KLTerm(placement=placement, value=value)
    _, clipped = loss_and_slope(batch, objective_of(kl=replace(term, **clip), **choices))
    _, free = loss_and_slope(batch, objective_of(kl=term, **choices))
    assert (free[batch.mask] != 0).all()
    gate = torch.sigmoid((gate_kl - 0.5) / 0.1)
    assert torch.allclose(clipped, gate[:, None] * free, rtol=1e-12, atol=1e-15)


def test_a_clipped_sequence_is_worth_its_clipped_kl():
    gate_kl = torch.tensor([0.0, 0.4, 0.6, 3.0], dtype=torch.float64)
    batch = random_batch(7, gate_kl=gate_kl, reference_length=5.0)
    batch = replace(batch, advantages=torch.zeros(ROWS, dtype=torch.float64))
    term = KLTerm(clip_method="hard", clip_threshold=0.1, clip_unit="token", value="k1")
    choices = {"surrogate": "score_function", "reduction": "sequence_sum", "beta": 1.0}
    output = grpo_loss(batch, objective_of(kl=term, **choices))
    k1 = torch.where(batch.mask, batch.policy_logprobs - read(batch, "ref_logprobs"), 0.0).sum(-1)
    open_rows = k1[2:] - 0.5  # the KL that the row really has, less its budget
    assert output.loss.item() == pytest.approx(open_rows.sum().item() / ROWS, abs=1e-12)


EVERY_TERM = [
    KLTerm(value="k3", gradient=gradient, horizon=horizon, placement=placement, off_policy=off_policy, **clip)
    for gradient, (horizon, off_policy), placement, clip in itertools.product(
        ("reverse", "forward"),
        (("token", "none"), ("token", "token"), ("sequence", "sequence")),
        ("loss", "advantage"),
        ({}, {"clip_method": "soft", "clip_unit": "sequence"}),
    )
]


@pytest.mark.parametrize("term", EVERY_TERM, ids=str)
@pytest.mark.parametrize("surrogate", ["ppo_clip", "cispo", "score_function"])
def test_padding_reaches_neither_the_loss_nor_the_gradient_nor_a_metric(term, surrogate):
    exact = torch.rand(ROWS, TOKENS, dtype=torch.float64)
    batch = random_batch(10, exact_kl=exact, advantages=torch.randn(ROWS, TOKENS, dtype=torch.float64))
    batch = replace(batch, mask=batch.mask & (torch.arange(ROWS) != 1)[:, None])  # a row without a token
    objective = objective_of(surrogate=surrogate, beta=0.3, kl=term)
    clean_metrics = grpo_loss(batch, objective).metrics
    clean = loss_and_slope(batch, objective)
    assert clean[0].isfinite() and clean[1].isfinite().all() and (clean[1] != 0).any()
    for poison in POISONS:
        dirty = {"policy_logprobs": batch.policy_logprobs.detach(), "old_logprobs": batch.old_logprobs}
        dirty |= {name: read(batch, name) for name in ("ref_logprobs", "sampler_logprobs")}
        dirty |= {"exact_kl": exact, "advantages": batch.advantages}
        dirty = {name: torch.where(batch.mask, x, poison) for name, x in dirty.items()}
        dirty["policy_logprobs"].requires_grad_(True)
        poisoned = changed(batch, **dirty)
        loss, slope = loss_and_slope(poisoned, objective)
        assert loss == clean[0]
        assert torch.equal(slope, clean[1])
        assert (slope[~batch.mask] == 0).all()
        assert grpo_loss(poisoned, objective).metrics == clean_metrics


@pytest.mark.parametrize(
    ("changes", "term", "missing"),
    [
        ({"ref_logprobs": None}, KLTerm(), "reference"),
        ({"sampler_logprobs": None}, KLTerm(off_policy="token"), "sampler"),
        ({}, KLTerm(value="exact"), "exact"),
        ({}, KLTerm(clip_method="hard"), "reference length"),
        ({"mask": torch.zeros(ROWS, TOKENS, dtype=torch.bool)}, KLTerm(), "mask"),
    ],
)
def test_what_the_loss_needs_and_the_batch_has_not_is_refused(changes, term, missing):
    with pytest.raises(KlampError, match=missing):
        grpo_loss(random_batch(12, **changes), objective_of(beta=0.1, kl=term))


@pytest.mark.parametrize("clip", ["none", "hard", "soft"])
def test_a_token_too_far_away_for_k3_leaves_the_loss_finite_and_is_counted(clip):
    batch = random_batch(dtype=torch.float32)
    policy = batch.policy_logprobs.detach().clone()
    policy[0, 0] = -150.0
    batch = replace(batch, policy_logprobs=policy.requires_grad_(True), old_logprobs=None)
    objective = objective_of(beta=0.1, kl=KLTerm(clip_method=clip, clip_unit="sequence"))
    output = grpo_loss(batch, objective)
    (slope,) = torch.autograd.grad(output.loss, batch.policy_logprobs)
    assert slope.isfinite().all() and output.loss.isfinite()
    assert output.metrics["kl/k3_saturated"] == 1 / batch.mask.sum()
    assert output.metrics["kl/k3"].isinf(), "what is measured is not bounded: a trainer stops at it"
