"""One configuration, two trainers: the same tensors through TRL and through klamp's own loss."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.batches import changed, flat_batch, objective_of, read
from tests.hosts.trl.hosts import LENGTH, PROMPTS, move, tokenizer
from tests.hosts.trl.losses import generated, gradient_of, loss_of, plain_logits, plain_logprobs, with_kl

from klamp.config import KLConfig
from klamp.config.loss import MASKS as MASK_FIELDS
from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.objective import grpo_loss
from klamp.core.penalty import advantages_with_kl
from klamp.core.surrogates import TrustRegion
from klamp.core.term import measure, prepare, sequence_gate_kl
from klamp.core.types import Batch
from klamp.hosts.common.rollout import excluded_ids, kl_tokens

BETA = 0.4
REDUCTIONS = {"grpo": "sequence_mean", "dr_grpo": "fixed_length", "dapo": "token_mean", "luspo": "sequence_sum"}

CLIP = {"kl_clip_method": "hard", "kl_clip_threshold": 0.1, "kl_reference_length": 6}
SHIFT: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "advantage"}
REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **{f"{value} {gradient}": {"kl_estimator": value, "kl_gradient": gradient}
       for value in ("k1", "k2", "k3", "abs") for gradient in ("reverse", "forward", "own", "none")},
    "k3 over the sequence": {"kl_horizon": "sequence"},
    "forward over the sequence": {"kl_horizon": "sequence", "kl_gradient": "forward"},
    "exact": {"kl_estimator": "exact"},
    "exact forward": {"kl_estimator": "exact", "kl_gradient": "forward"},
    "exact over the sequence": {"kl_estimator": "exact", "kl_horizon": "sequence"},
    "hard clip": CLIP,
    "hard clip, batch level": CLIP | {"kl_clip_level": "batch"},
    "hard clip in total": {"kl_clip_method": "hard", "kl_clip_threshold": 0.8, "use_per_token_kl_threshold": False},
    "soft clip": CLIP | {"kl_clip_method": "soft", "kl_clip_temperature": 0.05},
    "exact, hard clip by sequence": CLIP | {"kl_estimator": "exact"},
    "bounded log-ratio": {"kl_max_log_ratio": 0.2},
    "token weights": {"kl_off_policy": "token"},
    "prefix weights, truncated": {"kl_off_policy": "sequence", "kl_horizon": "sequence", "kl_max_weight": 1.1},
    "without some tokens": {"kl_exclude_tokens": tuple(range(2, 58, 3))},
    "without some tokens, over the sequence": {"kl_exclude_tokens": tuple(range(2, 58, 3)), "kl_horizon": "sequence"},
    "in the advantage": SHIFT,
    "in the advantage, to go": SHIFT | {"kl_horizon": "sequence"},
    "in the advantage, clipped": SHIFT | CLIP,
    "in the reward": REWARD,
    "in the reward, clipped": REWARD | CLIP,
}  # fmt: skip


def own_loss(
    trainer: Any,
    base: Any,
    inputs: Any,
    rewards: torch.Tensor,
    kl: KLConfig,
    loss_type: str,
    first: Batch | None = None,
) -> tuple[torch.Tensor, Batch]:
    """klamp's loss without any number of the adapter's, and its batch; `first` is the batch of the first update."""
    mask, term = inputs["completion_mask"].bool(), kl.build_term()
    logits = plain_logits(trainer.model, inputs)
    with torch.no_grad():
        ref_logits = plain_logits(base, inputs)
    exact, excluded = kl.kl_estimator == "exact", excluded_ids(kl.kl_exclude_tokens, tokenizer())
    batch = flat_batch(
        policy_logprobs=plain_logprobs(logits, inputs),
        mask=mask,
        advantages=group_advantages(rewards, 2, scale="none", baseline="mean"),
        ref_logprobs=plain_logprobs(ref_logits, inputs),
        sampler_logprobs=inputs["sampling_per_token_logps"],
        kl_mask=kl_tokens(inputs["completion_ids"], mask, excluded) if kl.excludes else None,
        exact_kl=exact_kl(logits, ref_logits) if exact else None,
        exact_kl_forward=exact_kl(logits, ref_logits, direction="forward") if exact else None,
        reference_length=kl.kl_reference_length,
        group_size=2,
    )
    if first is not None:
        gate = {} if kl.kl_clip_method == "none" else {"gate_kl": read(first, "gate_kl")}
        batch = changed(batch, old_logprobs=first.policy_logprobs.detach(), advantages=first.advantages, **gate)
    elif kl.kl_clip_method != "none":
        batch = changed(batch, gate_kl=sequence_gate_kl(measure(batch, term)))
    if kl.kl_placement == "reward" and first is None:
        advantages = partial(group_advantages, group_size=2, scale="none", baseline="mean")
        found = advantages_with_kl(rewards, prepare(batch, term), beta=kl.beta, advantages=advantages)
        batch = replace(batch, advantages=found)
    objective = objective_of(reduction=REDUCTIONS[loss_type], max_length=LENGTH, beta=kl.beta, kl=term)
    return grpo_loss(batch, objective).loss, batch


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_the_same_loss_and_gradient(trainer: Any, base: Any, name: str, monkeypatch: Any) -> None:
    kl = KLConfig(beta=BETA, **CONFIGURATIONS[name])
    rewards = torch.tensor([1.0, 0.0, 0.25, -2.0])
    monkeypatch.setattr(trainer, "reward_funcs", [lambda completions, **_: rewards.tolist()])
    torch.manual_seed(5)
    completions = trainer._generate(PROMPTS[:1] * 2 + PROMPTS[1:2] * 2)
    monkeypatch.setattr(trainer, "_generate", lambda _: completions)
    start = copy.deepcopy(trainer.model.state_dict())
    other = ("grpo", "dr_grpo", "luspo")[list(CONFIGURATIONS).index(name) % 3]
    for loss_type in ("dapo", other):
        with_kl(trainer, kl, loss_type=loss_type, scale_rewards="none")
        inputs = generated(trainer)
        noise = 0.1 * torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(2))
        inputs["sampling_per_token_logps"] = inputs["ref_per_token_logps"] - noise
        first = None
        for update in (1, 2) if loss_type == "dapo" else (1,):
            found = loss_of(trainer, inputs)
            gradient = gradient_of(trainer, found)
            expected, batch = own_loss(trainer, base, inputs, rewards, kl, loss_type, first)
            expected_gradient = gradient_of(trainer, expected)
            # Terms of 1 to 3 cancel in the loss, and the float32 log-probabilities in each are right to 1e-6.
            assert found.item() == pytest.approx(expected.item(), abs=5e-6, rel=5e-6), (loss_type, update)
            scale = max(1.0, float(expected_gradient.norm()))  # how float32 sums are rounded depends on the processor
            assert (gradient - expected_gradient).abs().max() <= 1e-6 * scale, (loss_type, update)
            if kl.kl_gradient != "none" and update == 1:
                free = own_loss(trainer, base, inputs, rewards, replace(kl, beta=0.0), loss_type)[0]
                assert (gradient - gradient_of(trainer, free)).abs().max() > 1e-3  # the KL counts
            first, inputs["old_per_token_logps"] = batch, batch.policy_logprobs.detach()
            move(trainer.model)
        trainer.model.load_state_dict(start)


MASKS: dict[str, dict[str, Any]] = {
    "token mask": {"mode": "token_mask", "high": 1.1},
    "token mask, low": {"mode": "token_mask", "low": 0.9, "high": None},
    "sequence mask": {"mode": "sequence_mask", "high": 0.7},
    "truncated": {"mode": "token_truncate", "high": 1.1},
    "completions": {"threshold": 0.01},
    "tokens and completions": {"mode": "token_mask", "high": 1.1, "threshold": 0.01},
    "truncated, completions": {"mode": "sequence_truncate", "high": 1.1, "threshold": 0.01},
    "dppo_tv": {"dppo_mask": "dppo_tv", "dppo_mask_low": 1e-4, "dppo_mask_high": 1e-4},
    "dppo_kl, token mask": {"dppo_mask": "dppo_kl", "dppo_mask_low": 1e-5, "mode": "token_mask", "high": 1.2},
    "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.04},
    "seq_mean_k1, truncated": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.06, "mode": "token_truncate"},
}


IN_LOSS = ("token mask", "completions", "dppo_kl, token mask", "seq_max_k3")


@pytest.mark.parametrize(
    ("name", "placement"), [*((name, "advantage") for name in MASKS), *((name, "loss") for name in IN_LOSS)]
)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_what_trl_masks_keeps_its_kl_in_the_advantage(
    trainer: Any, base: Any, name: str, placement: Any, monkeypatch: Any
) -> None:
    region = TrustRegion(**{"high": 3.0} | MASKS[name])
    kl = KLConfig(beta=BETA, **SHIFT if placement == "advantage" else {})
    monkeypatch.setattr(trainer, "args", copy.copy(trainer.args))
    for field in MASK_FIELDS:
        setattr(trainer.args, field, getattr(region, field) if region.rollout_rs or region.dppo_mask else None)
    inputs = generated(with_kl(trainer, kl, loss_type="dapo"))
    mask, logits = inputs["completion_mask"].bool(), plain_logits(trainer.model, inputs)
    policy = plain_logprobs(logits, inputs)
    noise = 0.2 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(3)) + 0.02
    inputs |= {"old_per_token_logps": policy.detach(), "sampling_per_token_logps": policy.detach() + noise}
    settings = {"use_vllm": region.mode is not None, "off_policy_mask_threshold": region.threshold}
    if region.mode is not None:
        log_ratio = -noise * mask
        ratio = (log_ratio.sum(-1, keepdim=True) if region.mode.startswith("sequence") else log_ratio).exp()
        outside = (ratio < (region.low or 0)) | (ratio > (region.high or math.inf))
        cut = ratio.masked_fill(outside, 0.0) if region.mode.endswith("mask") else ratio.clamp(region.low, region.high)
        inputs["importance_sampling_ratio"] = cut
        settings |= {"vllm_importance_sampling_mode": region.mode, "vllm_importance_sampling_correction": True}
    for field, value in settings.items():
        monkeypatch.setattr(trainer, field, value)
    gradient = gradient_of(trainer, loss_of(trainer, inputs))
    assert trainer.off_policy_mask_threshold == region.threshold
    batch = flat_batch(
        policy_logprobs=policy,
        mask=mask,
        advantages=inputs["advantages"],
        ref_logprobs=plain_logprobs(plain_logits(base, inputs).detach(), inputs),
        old_logprobs=inputs["old_per_token_logps"],
        sampler_logprobs=inputs["sampling_per_token_logps"],
    )
    objective = objective_of(reduction="token_mean", max_length=LENGTH, beta=BETA, kl=kl.build_term(), trust=region)
    output = grpo_loss(batch, objective)
    assert 0 < output.metrics["sampler/tokens_cut"] < 1
    if trainer._klamp.trust.is_set and region.mode is None:
        logged = trainer._metrics["train"]["sampler/tokens_cut"][-1]
        assert logged == pytest.approx(float(output.metrics["sampler/tokens_cut"]), abs=1e-6)
    torch.testing.assert_close(gradient, gradient_of(trainer, output.loss), rtol=1e-5, atol=1e-6)
