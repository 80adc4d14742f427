"""One configuration, two trainers: the same tensors through TRL and through klamp's own loss."""

import math
from typing import Any

import pytest
import torch
from tests.batches import flat_batch, objective_of
from tests.hosts.trl.hosts import (
    LENGTH,
    generated,
    gradient_of,
    klamp_trainer,
    noisy,
    plain_logits,
    plain_logprobs,
    with_kl,
)

from klamp.config import KLConfig
from klamp.core.objective import grpo_loss
from klamp.core.surrogates import TrustRegion

BETA = 0.4

SHIFT: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "advantage"}


@pytest.fixture(scope="module")
def trainer(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return klamp_trainer(
        noisy(base),
        tmp_path_factory.mktemp("parity"),
        trainer={"ref_model": base},
        beta=BETA,
        kl_monitor=True,
        scale_rewards="none",
    )


MASKS: dict[str, dict[str, Any]] = {
    "token mask": {"mode": "token_mask", "high": 1.1},
    "token mask, low": {"mode": "token_mask", "low": 0.9, "high": None},
    "sequence mask": {"mode": "sequence_mask", "high": 0.7},
    "truncated": {"mode": "token_truncate", "high": 1.1},
    "completions": {"threshold": 0.01},
    "tokens and completions": {"mode": "token_mask", "high": 1.1, "threshold": 0.01},
    "truncated, completions": {"mode": "sequence_truncate", "high": 1.1, "threshold": 0.01},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")
def test_what_trl_masks_keeps_its_kl_in_the_advantage(trainer: Any, base: Any, name: str, monkeypatch: Any) -> None:
    region = TrustRegion(**{"high": 3.0} | MASKS[name])
    kl = KLConfig(beta=BETA, **SHIFT)
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
    gradient = gradient_of(trainer, trainer.compute_loss(trainer.model, inputs))
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
    torch.testing.assert_close(gradient, gradient_of(trainer, output.loss), rtol=1e-5, atol=1e-6)
