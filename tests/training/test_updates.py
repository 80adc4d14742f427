"""Updates: the gradient is that of `grpo_loss` on the whole batch of plain forwards, however it is computed."""

from dataclasses import replace

import pytest
import torch
from tests.batches import changed, flat_batch
from tests.training.conftest import IN_ADVANTAGE, IN_REWARD, disturb, in_parts, refused, rollout_of
from torch.optim import SGD, AdamW

from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.objective import grpo_loss
from klamp.core.penalty import advantages_with_kl
from klamp.core.term import measure, prepare, sequence_gate_kl
from klamp.errors import NonFiniteError
from klamp.lab import updates
from klamp.lab.updates import update, with_old_logprobs
from klamp.scoring import completions
from klamp.scoring.scorer import score

pytestmark = pytest.mark.slow

BETA = 0.3
K1 = {"kl_estimator": "k1"}
CLIP = {"kl_clip_threshold": 0.2, "kl_reference_length": 6}
"""A budget of 1.2 nats, which some of the completions exceed, two of the three groups, and the batch."""
IN_TOTAL = {"kl_clip_method": "hard", "kl_clip_threshold": 0.7, "use_per_token_kl_threshold": False}
LEFT_OUT = {"kl_exclude_tokens": (5, 9, 20)}
VARIANTS = {
    "grpo": {"loss_type": "grpo", "advantage_baseline": "mean"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "sequence horizon": {"kl_horizon": "sequence", "loss_type": "dr_grpo"},
    "forward": {"kl_gradient": "forward", "temperature": 0.8},
    "exact": {"kl_estimator": "exact"},
    "exact forward": {"kl_estimator": "exact", "kl_gradient": "forward", "loss_type": "dapo"},
    "exact sequence": {"kl_estimator": "exact", "kl_horizon": "sequence", "loss_type": "dapo"},
    "hard": {"kl_clip_method": "hard", **CLIP},
    "hard group": {"kl_clip_method": "hard", "kl_clip_level": "group", **CLIP, "loss_type": "dapo"},
    "hard batch": {"kl_clip_method": "hard", "kl_clip_level": "batch", **CLIP, "loss_type": "dr_grpo"},
    "hard batch, closed": {"kl_clip_method": "hard", "kl_clip_level": "batch", **CLIP, "kl_clip_threshold": 0.3},
    "soft": {"kl_clip_method": "soft", **CLIP, "kl_clip_temperature": 0.12, "kl_estimator": "exact"},
    "soft group": {"kl_clip_method": "soft", "kl_clip_level": "group", **CLIP, "kl_clip_temperature": 0.12},
    "hard, one exact KL in a group": {"kl_clip_method": "hard", **CLIP, "exact_kl_completions": 1, "loss_type": "grpo"},
    "hard in total": {**IN_TOTAL, "kl_horizon": "sequence"},
    "in the reward": {**IN_REWARD, "scale_rewards": "none"},
    "in the advantage": {**K1, "kl_placement": "advantage"},
    "in the advantage, sequence": {**IN_ADVANTAGE, "loss_type": "dapo"},
    "in the advantage, hard": {**K1, "kl_placement": "advantage", "kl_clip_method": "hard", **CLIP},
    "token ratio": {"kl_off_policy": "token", "top_k": 20},
    "prefix ratio": {"kl_off_policy": "sequence", "kl_horizon": "sequence", "top_k": 20, "kl_max_weight": 0.9},
    "other reduction": {"kl_normalizer": "sequence_sum"},
    "tokens left out": {"kl_exclude_tokens": (5, 9, 20, 33), "kl_normalizer": "token_mean", "kl_max_log_ratio": 0.2},
    "tokens left out, sequence": {**LEFT_OUT, "kl_horizon": "sequence", "kl_clip_method": "hard", **CLIP},
    "tokens left out, exact": {**LEFT_OUT, "kl_estimator": "exact"},
    "truncated left out": {"mask_truncated_completions": True, "loss_type": "dapo"},
}


def moved(context):
    disturb(context.policy, size=0.03)
    return context, {name: x.clone() for name, x in context.policy.state_dict().items()}


def one_update(context, start, *, parts=1):
    context.policy.load_state_dict(start)
    context = in_parts(context, parts)
    rollout = rollout_of(context, beta=BETA)
    output = update(context, SGD(context.policy.parameters(), lr=1.0), rollout, context.objective.weighted(BETA))
    gradient = {name: p.grad.clone() for name, p in context.policy.named_parameters()}
    for name, p in context.policy.named_parameters():
        torch.testing.assert_close(p.detach(), start[name] - gradient[name], msg="the step is rate times gradient")
    return gradient, rollout, output


def gradient_of(context, rollout, beta=BETA):
    """The gradient of the trained weights in an update that moves none of them, and what it returns."""
    trained = {name: p for name, p in context.policy.named_parameters() if p.requires_grad}
    output = update(context, SGD(trained.values(), lr=0.0), rollout, context.objective.weighted(beta))
    return {name: p.grad.clone() for name, p in trained.items()}, output


def whole_loss(context, rollout, *, old=None):
    """klamp's loss of the step from plain forwards of both models, and the policy's log-probabilities; tests/core and
    tests/golden hold that loss."""
    config, term = context.config, context.objective.terms[0].term
    logits, ref_logits = (
        score(model, rollout.completions, temperature=config.rollout.temperature).logits
        for model in (context.policy, context.reference.model)
    )
    ids, size = rollout.completions.ids[..., None], config.rollout.num_generations
    own, ref = (x.log_softmax(-1).gather(-1, ids)[..., 0] for x in (logits, ref_logits.detach()))
    reverse, forward = (exact_kl(logits, ref_logits.detach(), direction=way) for way in ("reverse", "forward"))
    every = context.exact_completions == size

    def formed(rewards):
        return group_advantages(rewards, size, scale=config.loss.scale, baseline=config.loss.advantage_baseline)

    batch = flat_batch(
        policy_logprobs=own,
        mask=rollout.mask,
        advantages=formed(rollout.rewards),
        old_logprobs=old,
        ref_logprobs=ref,
        sampler_logprobs=rollout.completions.sampler_logprobs,
        exact_kl=reverse if every else None,
        exact_kl_forward=forward if every else None,
        kl_mask=rollout.kl_mask if config.kl.excludes else None,  # tests/training/test_sampling.py holds it
        reference_length=context.control.reference_length or config.kl.kl_reference_length,
        group_size=size,
    )
    if term.clip_method != "none":
        batch = changed(batch, gate_kl=sequence_gate_kl(measure(batch, term)))
    if term.placement == "reward":
        advantages = advantages_with_kl(rollout.rewards, prepare(batch, term), beta=BETA, advantages=formed)
        batch = replace(batch, advantages=advantages)
    return grpo_loss(batch, context.objective.weighted(BETA)), own.detach()


def assert_equal(gradient, expected, *, tolerance=1e-6):
    """Equal up to the tolerance, as a share of the whole gradient's norm where that is above 1."""
    assert gradient.keys() == expected.keys()
    norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
    for name in expected:
        off = float((gradient[name] - expected[name]).abs().max())
        assert off <= tolerance * max(1.0, norm), f"{name} is off by {off:.1e}; the gradient's norm is {norm:.1e}"


@pytest.mark.parametrize("name", VARIANTS)
def test_an_update_is_that_of_the_whole_batch_in_any_number_of_parts(context_of, name):
    context, start = moved(context_of(beta=BETA, max_grad_norm=0.0, **VARIANTS[name]))
    gradient, rollout, output = one_update(context, start)

    context.policy.load_state_dict(start)
    context.policy.zero_grad()
    expected, _ = whole_loss(context, rollout)
    expected.loss.backward()
    assert_equal(gradient, {n: p.grad for n, p in context.policy.named_parameters()}, tolerance=3e-6)
    assert max(float(g.abs().max()) for g in gradient.values()) > 0.01
    named = {"train/kl_penalty": 0.0} | expected.metrics | {"train/loss": expected.loss.detach()}
    for key in ("train/loss", "train/policy_loss", "train/kl_penalty"):
        assert output.losses[key] == pytest.approx(float(named[key]), abs=2e-6), key

    for parts in (2, 3, 7):
        split, other, output_in_parts = one_update(context, start, parts=parts)
        assert torch.equal(other.completions.ids, rollout.completions.ids)
        assert_equal(split, gradient)
        assert output_in_parts.losses == pytest.approx(output.losses, abs=1e-6, rel=1e-6)
        assert output_in_parts.grad_norm == pytest.approx(output.grad_norm, rel=1e-5)
        torch.testing.assert_close(other.advantages, rollout.advantages, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "exact sequence", "hard", "token ratio", "lora"])
def test_shared_prompts_and_rows_by_length_change_no_update_in_any_number_of_parts(context_of, monkeypatch, name):
    """As if a pass cost nothing: prompts are shared wherever they repeat, every length is a pass, parts cut groups."""
    changes = {"lora_r": 3} if name == "lora" else VARIANTS[name]
    context = context_of(beta=BETA, max_grad_norm=0.0, **changes)
    disturb(context.policy, size=0.03)
    plans, usual = [], completions.plan_of
    monkeypatch.setattr(completions, "plan_of", lambda *a, **k: plans.append(usual(*a, **k)) or plans[-1])

    def gradient(parts):
        split = in_parts(context, parts)
        return gradient_of(split, rollout_of(split, beta=BETA))[0]

    expected = gradient(1)
    assert not any(plan.shared or len(plan.buckets) > 1 for plan in plans)
    monkeypatch.setattr(completions, "PASS_TOKENS", 0)
    for parts in (1, 2, 5):
        plans.clear()
        assert_equal(gradient(parts), expected, tolerance=3e-6)
        assert all(plan.shared for plan in plans if len(plan.buckets) > 1) and any(plan.shared for plan in plans)


def test_later_updates_take_ratios_against_the_policy_before_the_first(context_of):
    context, _ = moved(context_of(beta=BETA, max_grad_norm=0.0, loss_type="dapo"))
    optimizer, objective = SGD(context.policy.parameters(), lr=0.5), context.objective.weighted(BETA)
    rollout = rollout_of(context, beta=BETA)
    _, before = whole_loss(context, rollout)
    first = update(context, optimizer, rollout, objective)
    rollout = with_old_logprobs(rollout, first)
    for _ in range(2):  # the third must not take the second for old
        expected, _ = whole_loss(context, rollout, old=before)
        output = update(context, optimizer, rollout, objective)
        rollout = with_old_logprobs(rollout, output)
        assert output.losses["train/loss"] == pytest.approx(float(expected.loss.detach()), abs=1e-5)
        policy_loss = expected.metrics["train/policy_loss"]
        assert output.losses["train/policy_loss"] == pytest.approx(float(policy_loss), abs=1e-5)
    ratio = (whole_loss(context, rollout)[1] - before).exp()
    assert (ratio - 1)[rollout.mask].abs().max() > 0.2
    assert 0 < output.losses["policy/ratio_clipped"] < 1
    assert first.losses["policy/ratio_clipped"] == 0


def test_gradient_clipping_shortens_the_step_and_keeps_its_direction(context_of):
    context, start = moved(context_of(beta=BETA, max_grad_norm=0.0))
    whole, _, output = one_update(context, start)
    norm = float(torch.cat([g.flatten() for g in whole.values()]).norm())
    assert output.grad_norm == pytest.approx(norm, rel=1e-4)
    bound = norm / 4
    context.config = replace(context.config, optim=replace(context.config.optim, max_grad_norm=bound))
    clipped, _, output = one_update(context, start, parts=2)
    assert output.grad_norm == pytest.approx(norm, rel=1e-4), "the norm that is logged is the one before clipping"
    assert_equal(clipped, {name: g / 4 for name, g in whole.items()})
    context.config = replace(context.config, optim=replace(context.config.optim, max_grad_norm=2 * norm))
    assert_equal(one_update(context, start)[0], whole)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_leaves_weights_and_moments_as_they_were(context_of, monkeypatch, broken):
    context, _ = moved(context_of(beta=BETA))
    optimizer, objective = AdamW(context.policy.parameters(), lr=0.1), context.objective.weighted(BETA)
    rollout = rollout_of(context, beta=BETA)
    update(context, optimizer, rollout, objective)
    weights = {name: x.clone() for name, x in context.policy.state_dict().items()}
    moments = [x.clone() for state in optimizer.state.values() for x in state.values()]
    usual = updates.grpo_loss

    def spoiled(*args, **kwargs):
        output = usual(*args, **kwargs)
        policy = args[0].policy_logprobs
        # 0 in value; its gradient is 0 times infinity
        hidden = (policy - policy.detach()).abs().sqrt().sum()
        return output._replace(loss=output.loss * float("nan") if broken == "loss" else output.loss + hidden)

    monkeypatch.setattr(updates, "grpo_loss", spoiled)
    with refused(NonFiniteError, "learning rate"):
        update(context, optimizer, rollout, objective)
    assert all(torch.equal(x, weights[name]) for name, x in context.policy.state_dict().items())
    after = [x for state in optimizer.state.values() for x in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, moments, strict=True))
    monkeypatch.undo()
    update(context, optimizer, rollout, objective)  # and nothing of the bad gradient is left over
    assert all(p.isfinite().all() for p in context.policy.parameters())


@pytest.mark.parametrize(
    ("rank", "changes"),
    [(3, {"reference": "frozen"}), (3, {"gradient_checkpointing": True}), (0, {"gradient_checkpointing": True})],
)
def test_an_update_is_the_same_whatever_saves_memory(context_of, rank, changes):
    """The adapter switched off is the frozen copy, and recomputed activations are the stored ones."""
    updated = []
    for more in ({}, changes):
        context = context_of(beta=BETA, max_grad_norm=0.0, kl_horizon="sequence", lora_r=rank, **more)
        disturb(context.policy, size=0.02)
        updated.append(gradient_of(context, rollout_of(context, beta=BETA)))
    (expected, plain), (gradient, saving) = updated
    assert_equal(gradient, expected)
    assert saving.losses == pytest.approx(plain.losses, abs=1e-6) and plain.losses["train/kl_penalty"] > 0.01
