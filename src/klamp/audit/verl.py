"""Audits verl: every `kl_loss_type` of its `kl_penalty`, in its loss and in its reward, and its distillation.

The loss side is the `kl_penalty` that `verl.workers.utils.losses.ppo_loss` calls, under the name that it calls it by.
The reward side is `apply_kl_penalty`. A loss of distillation goes through `distillation_ppo_loss` as verl's engine
calls it, without task rewards: the sampler's log-probabilities are those of the student, what a teacher's server would
say of each token is read off the teacher's logits, and rows are nested, so that padding never reaches the loss.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from klamp.audit.examine import PROMPT, Distillation, Sequences, Subject, Term, marked

LOSS_TYPES = ("low_var_kl", "kl", "abs", "mse", "low_var_kl+", "kl+", "abs+", "full")
REWARD_TYPES = ("kl", "abs", "mse", "low_var_kl")
ALIASES = {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "low_var_kl+": "k3+", "kl+": "k1+"}


def subject() -> Subject:
    """Prepare the KL of the installed verl for an audit: one term per type and place."""
    import verl.trainer.ppo.ray_trainer  # noqa: F401  (here, where what it says of missing engines is kept quiet)
    from verl.workers.config import ActorConfig

    defaults: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(ActorConfig)}
    kind = defaults["kl_loss_type"]
    return Subject(
        title=f"verl {version('verl')}, ppo_loss and apply_kl_penalty",
        losses=(*(_in_loss(name, kind) for name in LOSS_TYPES), *map(_in_reward, REWARD_TYPES), *distillations()),
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
    return f"{kind} ({ALIASES[kind]})" if kind in ALIASES else kind


TOP = 3
OF_YAML: dict[str, Any] = {"loss_max_clamp": None, "log_prob_min_clamp": None, "use_policy_gradient": False}
"""What distillation.yaml sets otherwise than the class: no clamps, and no policy gradient."""


def distillations() -> tuple[Distillation, ...]:
    """The default of the yaml file, that of the class, and the other modes: as a loss, k1 is refused and kl is not."""
    as_loss = ("k3 (default of the yaml)", "kl", "k1", "k2", "abs")
    topk, cut = {"loss_mode": "forward_kl_topk", "topk": TOP}, f"forward_kl_topk, topk={TOP}"
    policy_gradient = {**OF_YAML, "use_policy_gradient": True}
    return (
        *(_distillation(f"loss_mode={name}", {**OF_YAML, "loss_mode": name.split()[0]}) for name in as_loss),
        _distillation("loss_mode=k3, policy gradient, clamps (default of the class)", {"loss_mode": "k3"}),
        *(
            _distillation(f"loss_mode={name}, policy gradient", {**policy_gradient, "loss_mode": name})
            for name in ("k1", "k2", "abs")
        ),
        _distillation(f"loss_mode={cut}", {**OF_YAML, **topk}),
        _distillation(f"loss_mode={cut}, policy gradient", {**policy_gradient, **topk}),
    )


def _distillation(name: str, options: dict[str, Any]) -> Distillation:
    means = "forward" if "forward" in options["loss_mode"] else "reverse"
    return Distillation(name=name, loss=lambda batch: loss(batch, options), means=means)


def loss(batch: Sequences, options: dict[str, Any]) -> Tensor:
    """verl's loss of a batch at `loss_agg_mode` token-mean, its default."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

    with contextlib.redirect_stdout(io.StringIO()):  # what it says of a configuration of its own
        distilled = DistillationLossConfig(use_task_rewards=False, **options)
        config = DistillationConfig(distillation_loss=distilled)
        actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    ends = (PROMPT + batch.mask.sum(-1)).tolist()
    student, teacher, tokens = ([row[:end] for row, end in zip(each, ends, strict=True)] for each in batch[:3])
    following = [row.roll(-1) for row in tokens]
    scores = [logprobs_from_logits(row, ids) for row, ids in zip(student, following, strict=True)]
    data = _data(batch, tokens, scores)
    said = [row.detach().log_softmax(-1) for row in teacher]
    if distilled.loss_settings.use_topk:
        best = [row.topk(options["topk"], -1) for row in said]
        data["teacher_logprobs"], data["teacher_ids"] = (
            _nested([x.values for x in best]),
            _nested([x.indices for x in best]),
        )
    else:
        ids = [row[:, None] for row in following]
        data["teacher_logprobs"] = _nested([row.gather(-1, x) for row, x in zip(said, ids, strict=True)])
        data["teacher_ids"] = _nested(ids)
    output = {"log_probs": _nested(scores)}
    if distilled.loss_settings.use_topk:
        found = distillation_ppo_loss(actor, config, data=data, student_logits=torch.cat(student)[None])
        output |= {name: _nested(list(values[0].split(ends))) for name, values in found.items()}
    total, _ = distillation_ppo_loss(actor, config, model_output=output, data=data)
    return total


def _data(batch: Sequences, tokens: list[Tensor], scores: list[Tensor]) -> Any:
    """What a micro-batch of verl holds besides the teacher's scores."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    width = int(batch.mask.sum(-1).max())
    old = torch.zeros(len(tokens), width, dtype=batch.student.dtype)
    for row, each in enumerate(scores):
        old[row, : len(each) - PROMPT] = each[PROMPT - 1 : -1].detach()
    data = TensorDict(
        {
            "prompts": _nested([row[:PROMPT] for row in tokens]),
            "responses": _nested([row[PROMPT:] for row in tokens]),
            "response_mask": batch.mask[:, PROMPT : PROMPT + width],
            "old_log_probs": old,
            "advantages": torch.zeros_like(old),
        },
        batch_size=[len(tokens)],
    )
    for name, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}.items():
        tensordict_utils.assign_non_tensor_data(data, name, value)
    return data


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
