"""The teacher of a run of verl's: klamp's KL among verl's losses of distillation, its arguments, and what has no place.

verl's agent loop has each completion scored by the teacher's engine as soon as it is written; its actor's loss then
looks up a loss of distillation by name. The names are registered beforehand, so that they hold choices and no numbers.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import itertools
import warnings
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from klamp.config.fields import host_refusals
from klamp.config.teacher import Tail, TeacherConfig
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_sum
from klamp.core.penalty import token_penalty
from klamp.core.term import OffPolicy
from klamp.core.topk import topk_kl
from klamp.core.types import Batch, Direction, Horizon
from klamp.errors import ConfigError, KLWarning, Refusal, unknown_name
from klamp.hosts.verl.fields_in_verl import name_of

LOSSES, PADDING = "verl.trainer.distillation.losses", "verl.workers.utils.padding"
METRIC = "verl.utils.metric"
CHOICES: Mapping[str, tuple[object, ...]] = {
    "teacher_estimator": ("k1", "k3", "topk"),
    "teacher_direction": get_args(Direction),
    "teacher_top_k": (TeacherConfig.teacher_top_k, 0),
    "teacher_tail": get_args(Tail),
    "teacher_horizon": get_args(Horizon),
    "teacher_off_policy": get_args(OffPolicy),
}
"""What a name in the place of `loss_mode` may say; a head's size is verl's `topk`."""
OF_A_TOKEN = ("teacher_estimator", "teacher_horizon", "teacher_off_policy")
"""Those of them that k1 and k3 have."""
DISTILLATION = "distillation"
ONE = f"{DISTILLATION}.teacher_models.teacher_model"
"""The teacher that every configuration has; the settings of its engine are those of others too."""


def has_head(teacher: TeacherConfig) -> bool:
    """Whether the KL is summed over a head of the teacher's likeliest tokens."""
    return teacher.teacher_estimator == "topk" and teacher.teacher_top_k > 0


def teacher_name(teacher: TeacherConfig) -> str:
    """The name of a KL to a teacher among verl's losses of distillation."""
    places = CHOICES if teacher.teacher_estimator == "topk" else OF_A_TOKEN
    return name_of(teacher, [field for field in places if field != "teacher_top_k" or not has_head(teacher)])


@functools.cache
def named() -> dict[str, TeacherConfig]:
    """Every name that is registered, and the KL that it stands for."""
    found = dict[str, TeacherConfig]()
    with warnings.catch_warnings(action="ignore", category=KLWarning):
        for values in itertools.product(*CHOICES.values()):
            fields: Any = dict(zip(CHOICES, values, strict=True))
            try:
                teacher = TeacherConfig(teacher_model="a model", teacher_head="teacher", **fields)
            except ConfigError:
                continue
            if not any(row.applies for row in teacher_refusals(teacher)):
                found.setdefault(teacher_name(teacher), teacher)
    return found


def teacher_of(name: str) -> TeacherConfig:
    """The KL to a teacher that a registered name stands for; of a head verl's `topk` says how large."""
    if name not in named():
        raise unknown_name("KL to a teacher", name, tuple(named()), why="verl knows registered names only")
    return named()[name]


def register_losses() -> None:
    """Add klamp's names to verl's losses of distillation, by verl's own registration."""
    losses: Any = importlib.import_module(LOSSES)
    for head in (True, False):
        names = [name for name, teacher in named().items() if has_head(teacher) == head]
        settings = losses.DistillationLossSettings(names=names, use_topk=head, use_estimator=not head)
        losses.register_distillation_loss(settings)(kl_to_teacher)


def kl_to_teacher(
    *, config: Any, distillation_config: Any, model_output: Mapping[str, Any], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """klamp's KL to the teacher per token, in nats, and metrics; verl masks and averages it. [B, T]

    verl weighs it by `distillation_loss_coef` beside its policy loss. Where it trains on the teacher alone its weight
    is 1 whatever was asked for, so that the coefficient is put in here.
    """
    options = distillation_config.distillation_loss
    if options.use_policy_gradient:
        raise ConfigError(
            "klamp's KL to a teacher was asked for as an advantage of verl's",
            got=f"loss_mode={options.loss_mode!r}, use_policy_gradient=True",
            why="it has its own gradient, which verl would drop",
            fix="set distillation.distillation_loss.use_policy_gradient=False",
        )
    teacher = teacher_of(options.loss_mode)
    batch, coefficient = _batch(teacher, model_output, data), options.distillation_loss_coef
    penalty = token_penalty(batch, teacher.build_term())
    metrics = _measured(batch, data) | {"teacher/coef": coefficient}
    return penalty if options.use_task_rewards else penalty * coefficient, metrics


def _measured(batch: Batch, data: Any) -> dict[str, Any]:
    """Means over the tokens of verl's mini-batch, each micro-batch's part of them, under klamp's names."""
    assert batch.teacher_logprobs is not None
    if batch.teacher_kl is not None:
        values = {"teacher/kl": batch.teacher_kl}
    else:
        k1 = masked_log_ratio(batch.policy_logprobs, batch.teacher_logprobs, batch.mask)
        values = {"teacher/k1": k1, "teacher/kl": ESTIMATORS["k3"].value(k1)}
    share = data["dp_size"] / (data["batch_num_tokens"] or batch.mask.sum())
    metric: Any = importlib.import_module(METRIC).Metric
    return {name: metric("sum", masked_sum(each, batch.mask) * share) for name, each in values.items()}


def _batch(teacher: TeacherConfig, model_output: Mapping[str, Any], data: Any) -> Batch:
    """What verl hands to a loss of distillation, in klamp's words."""
    responses = functools.partial(importlib.import_module(PADDING).no_padding_2_padding, data=data)
    columns = (data[name] for name in ("response_mask", "old_log_probs"))
    mask, old = (each.to_padded_tensor(0) if each.is_nested else each for each in columns)
    kl: Tensor | None = None
    if has_head(teacher):
        plain, policy_mass, teacher_mass = (
            responses(model_output[name]) for name in ("distillation_losses", "student_mass", "teacher_mass")
        )
        kl = _with_tail(teacher.teacher_tail, plain, policy_mass, teacher_mass)
        policy, scored = torch.zeros_like(kl), torch.zeros_like(kl)  # read by no KL over a head
    else:
        policy, scored = responses(model_output["log_probs"]), responses(data["teacher_logprobs"]).squeeze(-1)
    if teacher.teacher_estimator == "topk" and kl is None:
        kl = _of_a_token(teacher, policy, scored, mask.bool(), old)
    return Batch(
        policy_logprobs=policy,
        mask=mask.bool(),
        advantages=torch.zeros_like(policy.detach()),
        old_logprobs=old,
        teacher_logprobs=scored,
        sampler_logprobs=old,
        teacher_kl=kl,
    )


def _of_a_token(teacher: TeacherConfig, policy: Tensor, scored: Tensor, mask: Tensor, old: Tensor) -> Tensor:
    """The KL of a head of no tokens, from the sampled one alone. [B, T]"""
    scored, no_head = scored.to(policy), policy.unsqueeze(-1)[..., :0]
    weight = None if teacher.teacher_off_policy == "none" else policy.detach() - old
    direction = teacher.teacher_direction
    return topk_kl(no_head, no_head, policy, scored, mask, direction=direction, log_weight=weight)


def _with_tail(tail: Tail, plain: Tensor, policy_mass: Tensor, teacher_mass: Tensor) -> Tensor:
    """The forward KL with a tail, from verl's plain sum of q log(q/p) over the head and both masses of it. [B, T]"""
    if tail == "none":
        return plain
    if tail == "generalised":
        return plain - teacher_mass + policy_mass
    least = torch.finfo(plain.dtype).eps
    policy, teacher = ((1 - mass).clamp(min=least) for mass in (policy_mass, teacher_mass))
    return plain + teacher * (teacher.log() - policy.log())


def places(teacher: TeacherConfig) -> list[str]:
    """Where each of them stands in verl's configuration; with several, none may have the name of the single one."""
    several = range(1, len(teacher.teacher_models) + 1)
    return [f"+{DISTILLATION}.teacher_models.teacher_{number}" for number in several] or [ONE]


def teacher_values(teacher: TeacherConfig) -> dict[str, object]:
    """The values that give a run of verl's this teacher: its engines, one GPU for each, and its loss."""
    models, loss = teacher.models, f"{DISTILLATION}.distillation_loss"
    values: dict[str, object] = {
        f"{DISTILLATION}.enabled": True,
        f"{DISTILLATION}.nnodes": 1,
        f"{DISTILLATION}.n_gpus_per_node": len(models),
        f"{ONE}.inference.tensor_model_parallel_size": 1,
        f"{loss}.loss_mode": teacher_name(teacher),
        f"{loss}.use_task_rewards": True,
        f"{loss}.distillation_loss_coef": teacher.teacher_coef,
        f"{loss}.use_policy_gradient": False,
        f"{loss}.loss_max_clamp": None,
        f"{loss}.log_prob_min_clamp": None,
    }
    if has_head(teacher):
        values[f"{loss}.topk"] = teacher.teacher_top_k
    for place, (key, model) in zip(places(teacher), models.items(), strict=True):
        values[f"{place}.model_path"] = model
        if key:
            values |= {f"{place}.key": key, f"{place}.num_replicas": 1, f"{place}.inference": f"${{{ONE}.inference}}"}
    return values | ({f"{DISTILLATION}.teacher_key": teacher.teacher_key} if teacher.teacher_key else {})


def teacher_refusals(c: TeacherConfig) -> list[Refusal]:
    """What verl's design does not let in, one row for each; docs/verl.md has the line that forbids it."""
    head = has_head(c)
    as_verl_has_it = (c.teacher_direction, c.teacher_head) == ("forward", "teacher") and c.teacher_tail != "sampled"
    return [
        *host_refusals(c, "verl"),
        Refusal(
            head and not as_verl_has_it,
            f"a head of teacher_top_k={c.teacher_top_k} tokens cannot be honoured by verl",
            got=f"teacher_direction={c.teacher_direction!r}, teacher_head={c.teacher_head!r}, "
            f"teacher_tail={c.teacher_tail!r}",
            why="where it has logits it computes the forward KL over the teacher's likeliest tokens, and drops the "
            "sampled token where that is none of them",
            fix="set teacher_direction='forward', teacher_head='teacher' and another teacher_tail, or teacher_top_k=0",
        ),
        Refusal(
            head and c.teacher_off_policy != "none",
            f"teacher_off_policy={c.teacher_off_policy!r} of a head cannot be honoured by verl",
            why="where it trains on a head alone its engine leaves out the log-probabilities of the sampled tokens",
            fix="set teacher_off_policy='none', or teacher_top_k=0",
        ),
    ]
