"""Audits Liger: the KL inside its chunked GRPO loss, and its fused loss of distillation.

`LigerFusedLinearGRPOLoss` computes log-probabilities chunk by chunk and hands each chunk to the static method
`LigerFusedLinearGRPOFunction.ppo_loss_fn`, which is what is called here, as it is: at beta 1 less at beta 0.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import Distillation, Sequences, Subject, marked, of_beta
from klamp.audit.trl import subject_of_loss


def subject() -> Subject:
    """Prepare the KL of the installed Liger for an audit; its loss has the options of TRL's."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    defaults = {name: each.default for name, each in inspect.signature(LigerFusedLinearGRPOLoss).parameters.items()}
    subject = subject_of_loss(
        f"liger-kernel {version('liger-kernel')}, LigerFusedLinearGRPOLoss",
        kl_loss,
        defaults,
        notes=(
            f"beta is {defaults['beta']:g} by default; without a reference model it compares the policy with itself.",
            "Log-probabilities reach the KL in float32, whatever the model's type.",
            "Its Triton kernels of the same losses need a GPU and are not audited.",
        ),
    )
    return replace(subject, losses=(*subject.losses, *map(_distillation, (0.5, 0.0, 1.0))))


def _distillation(beta: float) -> Distillation:
    """Liger's fused JSD at one beta, without its loss on labels (half of the whole by default)."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    default = inspect.signature(LigerFusedLinearJSDLoss).parameters["beta"].default
    fused = LigerFusedLinearJSDLoss(beta=beta, weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=False)

    def loss(batch: Sequences) -> Tensor:
        student, teacher, tokens, mask = batch.aligned
        heads = (torch.eye(x.shape[-1], dtype=x.dtype) for x in (student, teacher))
        labels = tokens.masked_fill(~mask, -100).flatten()
        mine, theirs = (x.flatten(0, 1) for x in (student, teacher))
        return fused(mine, next(heads), theirs, next(heads), labels)

    return Distillation(
        name=f"LigerFusedLinearJSDLoss, {marked('beta', beta, default)}", loss=loss, means=of_beta(beta)
    )


def kl_loss(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The KL part of Liger's loss, as a `HostLoss`; `options` are keyword arguments of `ppo_loss_fn`."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    losses = [
        LigerFusedLinearGRPOFunction.ppo_loss_fn(
            per_token_logps=policy,
            attention_mask=mask.to(policy.dtype),
            advantages=torch.zeros(len(policy), dtype=policy.dtype),
            full_attention_mask=mask.to(policy.dtype),
            ref_per_token_logps=ref,
            old_per_token_logps=old,
            beta=beta,
            max_completion_length=256,
            **options,
        )[0]
        for beta in (1.0, 0.0)
    ]
    return losses[0] - losses[1]
