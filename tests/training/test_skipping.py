"""Work that is not done: counted in forward passes and rows, and without a trace in the numbers."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.training.conftest import IN_REWARD, disturb, rollout_of
from tests.training.test_updates import BETA, CLIP, assert_equal, gradient_of

from klamp.lab import updates
from klamp.lab.loop import Trainer
from klamp.lab.updates import with_old_logprobs

HALF = {"reward": "tests.training.rewards:half", "max_grad_norm": 0.0, "prompts_per_step": 6}


@contextmanager
def counting(model):
    """Of each forward pass its rows, and whether it has a gradient."""
    passes = []
    decoder = getattr(model, "get_base_model", lambda: model)().model
    handle = decoder.register_forward_hook(
        lambda module, args, kwargs, out: passes.append((len(kwargs["input_ids"]), torch.is_grad_enabled())),
        with_kwargs=True,
    )
    try:
        yield passes
    finally:
        handle.remove()


def rows_of(passes, *, learning: bool) -> int:
    return sum(rows for rows, has_gradient in passes if has_gradient is learning)


def updated(context, rollout, beta):
    with counting(context.policy) as passes:
        return *gradient_of(context, rollout, beta), passes


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
    gradient, output, passes = updated(context, rollout, beta)
    expected, whole, every = without_skipping(context, rollout, beta, monkeypatch)
    assert_equal(gradient, expected, tolerance=3e-6)
    share = output.losses["policy/skipped"]
    assert 0 < share < 1 and whole.losses["policy/skipped"] == 0
    assert rows_of(passes, learning=True) == round(24 * (1 - share)) and rows_of(every, learning=True) == 24
    assert rows_of(passes, learning=False) == (0 if rollout.before is not None else round(24 * share))
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
    _, first, passes = updated(context, rollout, BETA)
    assert rows_of(passes, learning=False) == 0
    disturb(context.policy, size=0.02)
    rollout = with_old_logprobs(rollout, first)
    assert rollout.before is None
    _, second, passes = updated(context, rollout, BETA)
    assert rows_of(passes, learning=False) == 24 - rows_of(passes, learning=True) > 0
    skipped = rollout.mask & (rollout.advantages == 0)[:, None]
    assert (second.scores.logprobs - first.scores.logprobs)[skipped].abs().mean() > 1e-3


@pytest.mark.parametrize(
    ("changes", "before", "updates", "reference"),
    [
        ({}, 0, 1, 1),
        ({"num_iterations": 3}, 0, 3, 1),
        ({"gradient_accumulation_steps": 2}, 0, 2, 2),
        ({"kl_estimator": "exact", "kl_horizon": "sequence"}, 0, 1, 1),
        ({"kl_estimator": "k1", "kl_placement": "advantage"}, 0, 1, 1),
        ({"kl_clip_method": "hard", "kl_reference_length": 5}, 1, 1, 1),
        (IN_REWARD | {"loss_type": "dr_grpo"}, 1, 1, 1),
    ],
)
def test_a_step_makes_so_many_passes_and_no_more(context_of, changes, before, updates, reference):
    """The policy scores before the update only where something depends on it, and no more for the old policy."""
    trainer = Trainer(context_of(beta=BETA, **changes), [])
    context = trainer.context
    disturb(context.policy, size=0.03)
    passes = []
    context.scorer.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    with counting(context.reference.model) as there:
        trainer.train_step()
    assert passes == [False] * before + [True] * updates
    assert len(there) == reference
