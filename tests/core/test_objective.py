"""grpo_loss: the surrogate's gradient plus beta times the named KL's, for a whole batch or in micro-batches."""

import itertools
from dataclasses import replace

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, read, rows_of

from klamp.core.estimators import exact_kl
from klamp.core.masking import reduce_tokens
from klamp.core.objective import grpo_loss, without_gradient
from klamp.core.surrogates import ppo_clip
from klamp.core.term import KLTerm, measure, sequence_gate_kl
from klamp.errors import KlampError
from klamp.verify.oracle import examine
from klamp.verify.worlds import prefix_probs, random_chain

POISONS = (float("nan"), float("inf"), -float("inf"))
ROWS, TOKENS = 4, 5
SURROGATES = ("ppo_clip", "cispo", "score_function")
SUM = {"surrogate": "score_function", "reduction": "sequence_sum"}


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


def kl_only(term, *, skip=0):
    """The KL part of grpo_loss, one completion at a time, as a loss for the oracle; `skip` tokens carry no KL."""
    objective = objective_of(**SUM, beta=1.0, kl=term)

    def loss(y):
        batch = flat_batch(
            policy_logprobs=y.policy_logprobs,
            mask=y.mask,
            kl_mask=(torch.arange(y.mask.shape[1]) >= skip).expand_as(y.mask),
            advantages=torch.zeros_like(y.probs),
            ref_logprobs=y.ref_logprobs,
            sampler_logprobs=y.sampler_logprobs,
            exact_kl=exact_kl(y.policy_logits, y.ref_logits),
            exact_kl_forward=exact_kl(y.policy_logits, y.ref_logits, direction="forward"),
        )
        return torch.stack([grpo_loss(rows_of(batch, [n]), objective).loss for n in range(len(y.probs))])

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


@pytest.mark.parametrize("value", ["k3", "exact"])
@pytest.mark.parametrize("off_policy", ["none", "sequence"])
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_tokens_without_a_kl_still_count_in_the_prefix_and_still_cause_the_kl_of_later_ones(value, off_policy, horizon):
    chain = random_chain(7, vocab=3, length=3, sampler="policy" if off_policy == "none" else "other")
    log_p, log_q, probs = chain.logprobs("policy"), chain.logprobs("ref"), prefix_probs(chain, "policy")
    probs = probs.detach() if horizon == "token" else probs
    truth = (probs[1:] * (log_p.exp() * (log_p - log_q)).sum(-1)[1:]).sum()
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
    batch, priced = random_batch(3), objective_of(beta=0.5, kl=KLTerm(value="k1", placement="reward"))
    with_kl, without = loss_and_slope(batch, priced), loss_and_slope(batch, objective_of())
    assert with_kl[0] == without[0] and torch.equal(with_kl[1], without[1])
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


GATED = {
    "gate_kl": torch.tensor([0.0, 0.4, 0.6, 3.0], dtype=torch.float64),
    "advantages": torch.zeros(ROWS, dtype=torch.float64),
}


@pytest.mark.parametrize(("placement", "value"), [("loss", "k3"), ("advantage", "k1")])
def test_a_soft_gate_scales_each_sequences_kl_gradient_by_its_sigmoid(placement, value):
    batch, term = random_batch(6, **GATED), KLTerm(placement=placement, value=value)
    clip = {"clip_method": "soft", "clip_threshold": 0.5, "clip_temperature": 0.1, "clip_unit": "sequence"}
    _, clipped = loss_and_slope(batch, objective_of(kl=replace(term, **clip), beta=1.0, **SUM))
    _, free = loss_and_slope(batch, objective_of(kl=term, beta=1.0, **SUM))
    assert (free[batch.mask] != 0).all()
    gate = torch.sigmoid((GATED["gate_kl"] - 0.5) / 0.1)
    assert torch.allclose(clipped, gate[:, None] * free, rtol=1e-12, atol=1e-15)


def test_a_clipped_sequence_is_worth_its_clipped_kl():
    batch = random_batch(7, reference_length=5.0, **GATED)
    term = KLTerm(clip_method="hard", clip_threshold=0.1, clip_unit="token", value="k1")
    output = grpo_loss(batch, objective_of(kl=term, beta=1.0, **SUM))
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


@pytest.mark.parametrize(("term", "surrogate"), list(zip(EVERY_TERM, itertools.cycle(SURROGATES))), ids=str)
def test_padding_reaches_neither_the_loss_nor_the_gradient_nor_a_metric(term, surrogate):
    exact = torch.rand(ROWS, TOKENS, dtype=torch.float64)
    batch = random_batch(10, exact_kl=exact, advantages=torch.randn(ROWS, TOKENS, dtype=torch.float64))
    batch = replace(batch, mask=batch.mask & (torch.arange(ROWS) != 1)[:, None])  # a row without a token
    objective = objective_of(surrogate=surrogate, beta=0.3, kl=term)
    clean, (loss, slope) = grpo_loss(batch, objective), loss_and_slope(batch, objective)
    assert loss.isfinite() and slope.isfinite().all() and (slope != 0).any() and (slope[~batch.mask] == 0).all()
    whole = {name: getattr(batch, name).detach() for name in ("policy_logprobs", "old_logprobs", "advantages")}
    whole |= {name: read(batch, name) for name in ("ref_logprobs", "sampler_logprobs", "exact_kl")}
    for poison in POISONS:
        dirty = {name: torch.where(batch.mask, x, poison) for name, x in whole.items()}
        dirty["policy_logprobs"].requires_grad_(True)
        output = grpo_loss(changed(batch, **dirty), objective)
        assert output.loss == loss and output.metrics == clean.metrics
        assert torch.equal(torch.autograd.grad(output.loss, dirty["policy_logprobs"])[0], slope)


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
    (loss, slope), metrics = loss_and_slope(batch, objective), grpo_loss(batch, objective).metrics
    assert slope.isfinite().all() and loss.isfinite()
    assert metrics["kl/k3_saturated"] == 1 / batch.mask.sum()
    assert metrics["kl/k3"].isinf(), "what is measured is not bounded: a trainer stops at it"


# sequences without a gradient ----------------------------------------------------------------------------------------

CLIPS = ("none", "hard", "soft")
VALUES = (("k3", "reverse"), ("k3", "forward"), ("k2", "own"), ("k3", "none"), ("exact", "reverse"), ("exact", "none"))


def some_batch(seed: int, term: KLTerm, *, excluded: bool = False):
    """Eight sequences: every combination of a zero advantage, no token with a KL, and no token at all or some."""
    parts, rows = [random_batch(seed=seed + i) for i in range(2)], torch.arange(8)
    own, scored = ("policy_logprobs", "mask", "advantages"), ("ref_logprobs", "sampler_logprobs")
    columns = {name: torch.cat([getattr(p, name).detach() for p in parts]) for name in own}
    columns |= {name: torch.cat([read(p, name) for p in parts]) for name in scored}
    columns["mask"][rows == 7] = False
    columns["advantages"] = torch.where(rows % 2 == 0, 0.0, columns["advantages"])
    if excluded:
        columns["kl_mask"] = columns["mask"] & (rows % 4 >= 2)[:, None]
    batch = changed(parts[0], old_logprobs=None, gate_kl=None, reference_length=3.0, **columns)
    inputs = batch.policy_logprobs.requires_grad_(True)
    if term.value == "exact":
        generator = torch.Generator().manual_seed(seed)
        inputs, ref = torch.randn(2, 8, 5, 6, generator=generator, dtype=torch.float64)
        logprobs = inputs.requires_grad_(True).log_softmax(-1)[..., 0]
        batch = changed(batch, policy_logprobs=logprobs, exact_kl=exact_kl(inputs, ref))
    if term.clip_method != "none":
        gate = sequence_gate_kl(measure(changed(batch, exact_kl=None), term)).detach()
        batch = changed(batch, gate_kl=gate * torch.where(rows < 4, 1.0, 0.01))
    return batch, inputs


def terms():
    in_loss = itertools.product(["loss"], CLIPS, VALUES)
    elsewhere = itertools.product(("reward", "advantage"), CLIPS, [("k1", "reverse")])
    for placement, clip, (value, gradient) in (*in_loss, *elsewhere):
        yield KLTerm(value=value, gradient=gradient, placement=placement, clip_method=clip, clip_threshold=0.2)


@pytest.mark.parametrize(("surrogate", "excluded"), [("ppo_clip", False), ("cispo", True), ("score_function", True)])
def test_a_sequence_is_left_out_exactly_where_autograd_finds_no_gradient(surrogate, excluded):
    flags = []
    for seed, (term, beta) in enumerate(itertools.product(terms(), (0.0, 0.3))):
        batch, inputs = some_batch(seed, term, excluded=excluded)
        objective = objective_of(surrogate=surrogate, beta=beta, kl=term)
        skipped = without_gradient(batch, objective)
        (slope,) = torch.autograd.grad(grpo_loss(batch, objective).loss, inputs)
        zero = (slope.flatten(1) == 0).all(-1)
        assert torch.equal(skipped, zero), (term, beta)
        flags.append(skipped)
    assert 0.26 < torch.cat(flags).double().mean() < 0.74


def test_a_gradient_per_token_and_nan_are_not_overlooked():
    batch = replace(random_batch(), advantages=torch.zeros(4, 5, dtype=torch.float64))
    assert without_gradient(batch, objective_of()).all()
    one = batch.advantages.clone()
    one[2, 0] = 1e-300
    assert without_gradient(replace(batch, advantages=one), objective_of()).tolist() == [True, True, False, True]
    one[2, 0] = float("nan")
    assert not without_gradient(replace(batch, advantages=one), objective_of())[2]
