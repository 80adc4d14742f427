"""Work that is not done: counted in forward passes and rows, and without a trace in the numbers."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.training.conftest import disturb, rollout_of
from tests.training.test_updates import BETA, CLIP, assert_equal
from torch.optim import SGD

from klamp.lab import updates
from klamp.lab.loop import Trainer
from klamp.lab.updates import update, with_old_logprobs

HALF = {"reward": "tests.training.rewards:half", "max_grad_norm": 0.0, "prompts_per_step": 6}


class Counted:
    """Rows that go through a model's forward passes, with and without gradient."""

    def __init__(self) -> None:
        self.learning, self.scoring, self.passes = 0, 0, 0

    def __call__(self, module, args, kwargs, out) -> None:
        rows = kwargs["input_ids"].shape[0]
        self.passes += 1
        self.learning += rows * torch.is_grad_enabled()
        self.scoring += rows * (not torch.is_grad_enabled())


@contextmanager
def counting(model):
    counted = Counted()
    decoder = getattr(model, "get_base_model", lambda: model)().model
    handle = decoder.register_forward_hook(counted, with_kwargs=True)
    try:
        yield counted
    finally:
        handle.remove()


def updated(context, rollout, beta):
    parameters = {name: p for name, p in context.policy.named_parameters() if p.requires_grad}
    with counting(context.policy) as counted:
        output = update(context, SGD(parameters.values(), lr=0.0), rollout, context.objective.weighted(beta))
    return {name: p.grad.clone() for name, p in parameters.items()}, output, counted


def without_skipping(context, rollout, beta, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(updates, "without_gradient", lambda batch, objective: torch.zeros_like(batch.mask[:, 0]))
        return updated(context, replace(rollout, before=None), beta)


@pytest.mark.parametrize(
    ("beta", "changes"),
    [
        (0.0, {}),
        (0.0, {"kl_monitor": True, "gradient_accumulation_steps": 5}),
        (BETA, {"kl_clip_method": "hard", **CLIP}),
        (BETA, {"kl_clip_method": "hard", **CLIP, "kl_estimator": "exact", "gradient_accumulation_steps": 7}),
        (BETA, {"kl_clip_method": "hard", **CLIP, "kl_clip_threshold": 0.6, "lora_r": 2, "kl_horizon": "sequence"}),
        (BETA, {"kl_estimator": "k1", "kl_placement": "advantage", "kl_clip_method": "hard", **CLIP}),
        (BETA, {"mask_truncated_completions": True}),
    ],
)
def test_sequences_without_a_gradient_get_no_backward_pass_and_change_no_number(context_of, monkeypatch, beta, changes):
    context = context_of(beta=beta, **HALF, **changes)
    disturb(context.policy, size=0.03)
    rollout = rollout_of(context, prompts=6, beta=beta)
    gradient, output, counted = updated(context, rollout, beta)
    expected, whole, every = without_skipping(context, rollout, beta, monkeypatch)
    assert_equal(gradient, expected, tolerance=3e-6)
    share = output.losses["policy/skipped"]
    assert 0 < share < 1 and whole.losses["policy/skipped"] == 0
    assert counted.learning == round(24 * (1 - share)) and every.learning == 24
    assert counted.scoring == (0 if rollout.before is not None else round(24 * share))
    names = output.losses.keys() - {"policy/skipped"}
    assert {n: output.losses[n] for n in names} == pytest.approx({n: whole.losses[n] for n in names}, abs=1e-6)
    for name in ("logprobs", "entropy", "exact", "exact_forward"):
        ours, theirs = getattr(output.scores, name), getattr(whole.scores, name)
        assert (ours is None) == (theirs is None) == (name.startswith("exact") and context.reference is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_second_update_scores_the_skipped_rows_anew(context_of):
    context = context_of(beta=BETA, **HALF, kl_clip_method="hard", **CLIP)
    disturb(context.policy, size=0.03)
    rollout = rollout_of(context, prompts=6, beta=BETA)
    _, first, counted = updated(context, rollout, BETA)
    assert counted.scoring == 0
    disturb(context.policy, size=0.02)
    rollout = with_old_logprobs(rollout, first)
    assert rollout.before is None
    _, second, counted = updated(context, rollout, BETA)
    assert counted.scoring + counted.learning == 24 and counted.scoring > 0
    skipped = rollout.mask & (rollout.advantages == 0)[:, None]
    assert (second.scores.logprobs - first.scores.logprobs)[skipped].abs().mean() > 1e-3


@pytest.mark.parametrize(
    ("changes", "policy", "reference"),
    [
        ({}, 1, 1),
        ({"num_iterations": 3}, 3, 1),
        ({"gradient_accumulation_steps": 2}, 2, 2),
        ({"kl_clip_method": "hard", "kl_reference_length": 5}, 1, 1),
    ],
)
def test_a_step_makes_so_many_passes_and_no_more(context_of, changes, policy, reference):
    """On-policy, the log-probabilities of the first update are the old ones: nothing is scored twice."""
    trainer = Trainer(context_of(beta=BETA, **changes), [])
    context = trainer.context
    disturb(context.policy, size=0.03)
    sampled = []
    context.scorer.register_forward_hook(lambda *_: sampled.append(1))
    with counting(context.reference.model) as there:
        trainer.train_step()
    before = 1 if "kl_clip_method" in changes else 0
    assert len(sampled) == policy + before
    assert there.passes == reference
