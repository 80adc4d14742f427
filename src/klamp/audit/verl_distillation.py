"""verl's losses of distillation, each through `distillation_ppo_loss` as its engine calls it, without task rewards.

Tokens are the student's own, so the log-probabilities of the sampler are those of the student. What a teacher's server
would have said of each token is read off the teacher's logits; rows are nested, as verl's engine has them, so that
padding never reaches the loss.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import Tensor

from klamp.audit.distillation import PROMPT, Distillation, Sequences

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
