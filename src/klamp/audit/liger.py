"""Audits Liger: the KL inside its chunked GRPO loss.

`LigerFusedLinearGRPOLoss` computes log-probabilities chunk by chunk and hands each chunk to the static method
`LigerFusedLinearGRPOFunction.ppo_loss_fn`, which is what is called here, as it is: at beta 1 less at beta 0.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import BatchLoss, Subject, Term
from klamp.config import TRL_LOSS_TYPES

LONGEST = 256


def subject() -> Subject:
    """Prepare the KL of the installed Liger for an audit: one term per option, one reduction per loss type."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    defaults = {name: each.default for name, each in inspect.signature(LigerFusedLinearGRPOLoss).parameters.items()}
    corrected = bool(defaults["use_bias_correction_kl"])
    return Subject(
        title=f"liger-kernel {version('liger-kernel')}, LigerFusedLinearGRPOLoss",
        terms=(
            _term(f"use_bias_correction_kl={corrected} (default)", use_bias_correction_kl=corrected),
            _term(f"use_bias_correction_kl={not corrected}", use_bias_correction_kl=not corrected),
            _term(
                "sequence-level ratio, bias correction",
                importance_sampling_level="sequence",
                use_bias_correction_kl=True,
            ),
        ),
        reductions={
            f"loss_type={name}" + (" (default)" if name == defaults["loss_type"] else ""): _batch_loss(name)
            for name in TRL_LOSS_TYPES
        },
        notes=(
            f"beta is {defaults['beta']:g} by default; without a reference model it compares the policy with itself.",
            "Log-probabilities reach the KL in float32, whatever the model's type.",
            "Its Triton kernel of the same loss needs a GPU and is not audited.",
        ),
    )


def kl_loss(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The KL part of Liger's loss at coefficient 1, for a batch of log-probabilities `[B, T]`.

    Args:
        policy: log-probabilities of the policy.
        ref: of the reference.
        old: of the policy that sampled.
        mask: True on the tokens of the completions.
        options: keyword arguments of `ppo_loss_fn`.
    """
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
            max_completion_length=LONGEST,
            **options,
        )[0]
        for beta in (1.0, 0.0)
    ]
    return losses[0] - losses[1]


def _term(name: str, **options: Any) -> Term:
    def completion(policy: Tensor, ref: Tensor, old: Tensor) -> Tensor:
        mask = torch.ones(policy.shape, dtype=torch.bool)
        mean = kl_loss(policy, ref, old, mask, loss_type="grpo", **options)  # of one completion: over its tokens
        return mean * policy.shape[-1]

    return Term(name=name, completion=completion)


def _batch_loss(loss_type: str) -> BatchLoss:
    return lambda policy, ref, mask: kl_loss(policy, ref, policy.detach(), mask, loss_type=loss_type)
