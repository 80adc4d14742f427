"""Audits verl: every `kl_loss_type` of its `kl_penalty`, in its loss and in its reward.

The loss side is the `kl_penalty` that `verl.workers.utils.losses.ppo_loss` calls, under the name that it calls it by,
and `ppo_loss` itself for the way in which it is averaged. The reward side is `apply_kl_penalty`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import Subject, Term, marked

LOSS_TYPES = ("low_var_kl", "kl", "abs", "mse", "low_var_kl+", "kl+", "abs+", "full")
REWARD_TYPES = ("kl", "abs", "mse", "low_var_kl")
ALIASES = {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "low_var_kl+": "k3+", "kl+": "k1+"}
AVERAGES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


def subject() -> Subject:
    """Prepare the KL of the installed verl for an audit: one term per type and place, one reduction per loss mode."""
    import verl.trainer.ppo.ray_trainer  # noqa: F401  (here, where what it says of missing engines is kept quiet)
    from verl.workers.config import ActorConfig

    defaults: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(ActorConfig)}
    kind, average = defaults["kl_loss_type"], defaults["loss_agg_mode"]
    return Subject(
        title=f"verl {version('verl')}, ppo_loss and apply_kl_penalty",
        terms=(
            *(_loss_term(name, default=kind) for name in LOSS_TYPES),
            *(_reward_term(name) for name in REWARD_TYPES),
        ),
        reductions={
            marked("loss_agg_mode", name, average): functools.partial(kl_loss, loss_agg_mode=name) for name in AVERAGES
        },
        notes=(f"use_kl_loss is {defaults['use_kl_loss']} by default: without it there is no KL in the loss.",),
    )


def ppo_loss(policy: Tensor, ref: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The whole actor loss of verl for an on-policy batch `[B, T]` with advantages 0.

    Args:
        policy: log-probabilities of the policy.
        ref: of the reference.
        mask: True on the tokens of the completions, which stand at the left.
        options: fields of ActorConfig.
    """
    from tensordict import TensorDict
    from verl.workers.config import ActorConfig
    from verl.workers.utils import losses

    config = ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, **options)
    rows, _ = mask.shape
    prompt = torch.ones(rows, 1, dtype=torch.long)
    data = TensorDict(
        {
            "prompts": prompt,
            "responses": torch.zeros_like(mask, dtype=torch.long),
            "attention_mask": torch.cat([prompt, mask.long()], dim=1),
            "response_mask": mask.long(),
            "old_log_probs": policy.detach(),
            "advantages": torch.zeros_like(policy),
            "ref_log_prob": ref,
        },
        batch_size=[rows],
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        data.set_non_tensor(name, value)
    return losses.ppo_loss(config, {"log_probs": _without_padding(policy, mask)}, data)[0]


def reward_kl(policy: Tensor, ref: Tensor, *, kind: str) -> Tensor:
    """The number that verl's `apply_kl_penalty` takes from each token's reward at coefficient 1, without gradient."""
    from verl import DataProto  # pyright: ignore[reportAttributeAccessIssue]  (this file has the package's name)
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    tensors = {
        "response_mask": torch.ones_like(policy, dtype=torch.long),
        "token_level_scores": torch.zeros_like(policy),
        "old_log_probs": policy.detach(),
        "ref_log_prob": ref,
    }
    data, _ = apply_kl_penalty(DataProto.from_dict(tensors=tensors), FixedKLController(1.0), kl_penalty=kind)
    return -data.batch["token_level_rewards"]


def kl_loss(policy: Tensor, ref: Tensor, old: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The KL part of verl's loss, as a `HostLoss`; the loss is on-policy, whatever `old` says."""
    with_kl, without = (
        ppo_loss(policy, ref, mask, use_kl_loss=use, kl_loss_coef=1.0, **options) for use in (True, False)
    )
    return with_kl - without


def _loss_term(kind: str, *, default: str) -> Term:
    from verl.workers.utils import losses

    def function(policy: Tensor, ref: Tensor) -> Tensor:
        return losses.kl_penalty(logprob=policy, ref_logprob=ref, kl_penalty=kind)

    return Term.of_function(marked("kl_loss_type", _with_alias(kind), _with_alias(default)), function)


def _reward_term(kind: str) -> Term:
    def function(policy: Tensor, ref: Tensor) -> Tensor:
        return reward_kl(policy, ref, kind=kind)

    return Term.of_function(f"in the reward, kl_penalty={_with_alias(kind)}", function, use="reward")


def _without_padding(policy: Tensor, mask: Tensor) -> Tensor:
    """A batch in the flat layout of verl: one prompt token per row, each number one place before its token."""
    ends = [torch.cat([row[kept], row.new_zeros(1)]) for row, kept in zip(policy, mask, strict=True)]
    return torch.cat(ends)


def _with_alias(kind: str) -> str:
    return f"{kind} ({ALIASES[kind]})" if kind in ALIASES else kind
