"""Audits verl: every `kl_loss_type` of its `kl_penalty`, in its loss and in its reward.

The loss side is the `kl_penalty` that `verl.workers.utils.losses.ppo_loss` calls, under the name that it calls it by.
The reward side is `apply_kl_penalty`.
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
from klamp.names import VERL_ESTIMATORS

LOSS_TYPES = ("low_var_kl", "kl", "abs", "mse", "low_var_kl+", "kl+", "abs+", "full")
REWARD_TYPES = ("kl", "abs", "mse", "low_var_kl")


def subject() -> Subject:
    """Prepare the KL of the installed verl for an audit: one term per type and place."""
    import verl.trainer.ppo.ray_trainer  # noqa: F401  (here, where what it says of missing engines is kept quiet)
    from verl.workers.config import ActorConfig

    defaults: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(ActorConfig)}
    kind = defaults["kl_loss_type"]
    return Subject(
        title=f"verl {version('verl')}, ppo_loss and apply_kl_penalty",
        losses=(*(_in_loss(name, kind) for name in LOSS_TYPES), *map(_in_reward, REWARD_TYPES)),
        notes=(f"use_kl_loss is {defaults['use_kl_loss']} by default: without it there is no KL in the loss.",),
    )


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


def _in_loss(kind: str, default: str) -> Term:
    from verl.workers.utils import losses

    return Term(
        name=marked("kl_loss_type", _with_alias(kind), _with_alias(default)),
        function=lambda policy, ref: losses.kl_penalty(logprob=policy, ref_logprob=ref, kl_penalty=kind),
    )


def _in_reward(kind: str) -> Term:
    function = functools.partial(reward_kl, kind=kind)
    return Term(name=f"in the reward, kl_penalty={_with_alias(kind)}", function=function, in_reward=True)


def _with_alias(kind: str) -> str:
    own = kind.removesuffix("+")
    return f"{kind} ({VERL_ESTIMATORS[own]}{kind[len(own) :]})" if own in VERL_ESTIMATORS else kind
