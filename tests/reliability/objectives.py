"""A batch, and objectives that together have every part that an objective can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from klamp.core.objective import Objective, grpo_loss
from klamp.core.term import KLTerm
from klamp.core.types import Batch

CLIP: dict[str, Any] = {"clip_method": "soft", "clip_unit": "sequence", "clip_threshold": 0.2}
OBJECTIVES = {
    "no KL": Objective(beta=0.0),
    "k3 in the loss": Objective(beta=0.1, kl=KLTerm(value="k3", gradient="reverse")),
    "k1 over sequences": Objective(
        beta=0.1,
        reduction="token_mean",
        kl=KLTerm(value="k1", gradient="reverse", horizon="sequence", off_policy="sequence", max_weight=2.0),
    ),
    "forward with token weights": Objective(
        beta=0.1, surrogate="cispo", kl=KLTerm(value="k3", gradient="forward", off_policy="token", max_log_ratio=1.0)
    ),
    "clipped": Objective(beta=0.1, reduction="sequence_sum", kl=KLTerm(value="k3", gradient="reverse", **CLIP)),
    "exact": Objective(beta=0.1, kl=KLTerm(value="exact", gradient="reverse")),
    "in the advantage": Objective(
        beta=0.1, surrogate="score_function", reduction="fixed_length", max_length=8, kl=KLTerm(placement="advantage")
    ),
}


def inputs() -> Batch:
    """Four completions of six tokens in float32, with everything that an objective may ask for."""
    generator = torch.Generator().manual_seed(0)
    names = ("policy_logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "exact_kl")
    columns = {name: -2 * torch.rand(4, 6, generator=generator) for name in names}
    columns["exact_kl"] = -columns["exact_kl"]
    mask = torch.rand(4, 6, generator=generator) > 0.3
    return Batch(mask=mask, advantages=torch.randn(4, generator=generator), group_size=2, **columns)


def loss_and_slopes(objective: Objective, batch: Batch, loss_of: Any = None, **changes: Any) -> tuple[Tensor, ...]:
    """The loss, and its gradients by the policy's log-probabilities and by the exact KL."""
    leaves = [x.detach().requires_grad_(True) for x in (batch.policy_logprobs, batch.exact_kl) if x is not None]
    batch = replace(batch, policy_logprobs=leaves[0], exact_kl=leaves[1], **changes)
    loss = (loss_of or grpo_loss)(batch, objective).loss
    return loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
