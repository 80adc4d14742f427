"""klamp's masks and weights against verl's own functions, which have the same names."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.batches import objective_of
from tests.engines.verl.actor import Step, actor_loss, gradient
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask

from klamp.core.objective import grpo_loss
from klamp.core.surrogates import Trusted, TrustRegion

WHOLE = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 19.0, "reduction": "token_mean"}
"""verl's DPPO: the ratio up to 20 times the log-probability."""


@pytest.mark.parametrize(("name", "low", "high"), [("dppo_tv", 0.02, 0.05), ("dppo_kl", 0.002, 0.0005)])
def test_dppo_is_verl_s(name: Any, low: float, high: float) -> None:
    step = Step.random(rows=40, seed=3)
    loss, _ = actor_loss(step, loss_mode=name, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=20.0)
    region = TrustRegion(dppo_mask=name, dppo_mask_low=low, dppo_mask_high=high)
    output = grpo_loss(step.batch(), objective_of(**WHOLE, trust=region))
    assert (gradient(loss, step) - gradient(output.loss, step)).abs().max() < 1e-6
    assert loss.item() == pytest.approx(output.loss.item(), abs=1e-6)
    assert 0.05 < output.metrics["sampler/tokens_cut"] < 0.95


@pytest.mark.parametrize(("name", "threshold"), [("seq_max_k3", 0.01), ("seq_mean_k1", 1.1)])
def test_a_rejection_is_verl_s(name: Any, threshold: float) -> None:
    step = Step.random(rows=200, seed=4)
    theirs, _ = compute_rollout_rejection_mask(step.policy - step.old, step.mask.long(), name, threshold)
    ours = Trusted.of(step.batch(), TrustRegion(rollout_rs=name, rollout_rs_threshold=threshold)).weights
    assert torch.equal(ours.bool() & step.mask, theirs.bool())
    assert 0.05 < theirs[step.mask].float().mean() < 0.95


@pytest.mark.parametrize(("level", "bounds"), [("token", "0.8_1.25"), ("sequence", "0.5_2.0"), ("token", "1.2")])
def test_weights_are_verl_s_and_the_effective_sample_size_is_that_before_the_cut(level: str, bounds: str) -> None:
    step = Step.random(rows=200, seed=5)
    log_ratio = (step.policy - step.old).detach()
    theirs, metrics = compute_rollout_correction_weights(log_ratio, step.mask.long(), level, bounds)
    low, _, high = bounds.rpartition("_")
    mode: Any = f"{level}_{'mask' if low else 'truncate'}"
    region = TrustRegion(
        mode=mode, low=float(low) if low else None, high=float(high), dppo_mask="dppo_tv", dppo_mask_high=1
    )
    trusted = Trusted.of(replace(step.batch(), old_logprobs=None, advantages=step.advantages.abs()), region)
    assert (trusted.weights * step.mask - theirs).abs().max() < 1e-6
    w = log_ratio.exp()[step.mask]
    assert trusted.metrics["sampler/ess"] == pytest.approx(float(w.mean() ** 2 / w.square().mean()))
    assert abs(trusted.metrics["sampler/ess"] - metrics["rollout_is_eff_sample_size"]) > 0.001
