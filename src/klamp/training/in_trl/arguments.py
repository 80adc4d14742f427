"""The arguments of TRL that a run's configuration means; nothing of TRL is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.config import KLConfig, LossConfig
from klamp.config.loss import LossType
from klamp.config.teacher import TeacherConfig
from klamp.errors import ConfigError
from klamp.training.config import RolloutConfig, TrainConfig
from klamp.training.folders import CHECKPOINTS

TEACHER_PROMPT = "klamp_teacher_prompt"
"""The column of the text that the teacher sees in the place of a prompt."""
LOSS_TYPES: Mapping[LossType, str] = {"dapo": "dapo", "grpo": "grpo", "dr_grpo": "dr_grpo", "bnpo": "dapo"}
"""klamp's loss type -> TRL's of the same average; TRL's bnpo divides each micro-batch by itself."""


def trl_arguments(config: TrainConfig, folder: Path, *, processes: int, exact: int | None) -> dict[str, Any]:
    """What `klamp.trl.GRPOConfig` is to be called with.

    A step of klamp is a rollout with all of its updates; TRL counts the updates.

    Args:
        config: the run.
        folder: of the run.
        processes: how many processes share a step.
        exact: completions per group whose exact KL is measured; None: whatever the vocabulary allows.

    Raises:
        ConfigError: a step that does not divide over the processes and parts.
    """
    optim, run = config.optim, config.run
    updates, parts = optim.num_iterations, optim.gradient_accumulation_steps
    constant = optim.lr_scheduler_type == "constant"
    return {
        "output_dir": str(folder / CHECKPOINTS),
        "max_steps": run.max_steps * updates,
        "seed": run.seed,
        "per_device_train_batch_size": part_size(config, processes),
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "num_iterations": updates,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": "constant_with_warmup" if constant else optim.lr_scheduler_type,
        "warmup_steps": min(optim.warmup_steps, run.max_steps) * updates,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.adam_beta1,
        "adam_beta2": optim.adam_beta2,
        "max_grad_norm": optim.max_grad_norm,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if config.model.gradient_checkpointing else None,
        **({} if exact is None else {"exact_kl_completions": exact}),
        **_rollout(config.rollout),
        **_loss(config.loss),
        **_kl(config.kl),
        **_teacher(config.teacher),
        **_left_to_klamp(),
    }


def part_size(config: TrainConfig, processes: int) -> int:
    """Completions that a process computes at once.

    Raises:
        ConfigError: the completions of a step do not divide over processes and parts.
    """
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    shares = processes * config.optim.gradient_accumulation_steps
    if completions % shares:
        raise ConfigError(
            "the completions of a step do not divide over processes and parts",
            got=f"{completions} completions, {processes} processes, "
            f"gradient_accumulation_steps={config.optim.gradient_accumulation_steps}",
            why="TRL gives every process the same number of parts of the same size",
            fix=f"make prompts_per_step * num_generations a multiple of {shares}",
        )
    return completions // shares


def _rollout(rollout: RolloutConfig) -> dict[str, Any]:
    asked = rollout.sampler == "vllm" or rollout.sampler_url is not None
    server = {"vllm_mode": "server", "vllm_server_base_url": rollout.sampler_url}
    vllm = {"use_vllm": True, **({"vllm_mode": "colocate"} if rollout.sampler_url is None else server)}
    return {
        "num_generations": rollout.num_generations,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "mask_truncated_completions": rollout.mask_truncated_completions,
        **(vllm if asked else {"use_vllm": False}),
    }


def _loss(loss: LossConfig) -> dict[str, Any]:
    scale = {"scale_rewards": "group" if loss.scale == "std" else "none"} | _trust(loss)
    if loss.surrogate == "cispo":
        return {"loss_type": "cispo", "epsilon_high": 1 + loss.clip_high} | scale  # TRL's is the bound itself
    return {"loss_type": LOSS_TYPES[loss.loss_type], "epsilon": loss.epsilon, "epsilon_high": loss.clip_high} | scale


def _trust(loss: LossConfig) -> dict[str, Any]:
    """The trust region to the sampler, whose fields have TRL's names; without a mode TRL's default stays."""
    given: dict[str, Any] = {"off_policy_mask_threshold": loss.off_policy_mask_threshold}
    if loss.vllm_importance_sampling_mode is None:
        return given
    names = ("mode", "clip_max", "clip_min")
    own = {f"vllm_importance_sampling_{name}": getattr(loss, f"vllm_importance_sampling_{name}") for name in names}
    return given | own | {"vllm_importance_sampling_correction": True}


def _kl(kl: KLConfig) -> dict[str, Any]:
    """The fields of the KL under their own names; beta 0 alone where there is none, so that TRL loads no reference."""
    if not kl.needs_reference:
        return {"beta": 0.0}
    given = {field.name: getattr(kl, field.name) for field in dataclasses.fields(kl)}
    return {name: value for name, value in given.items() if value is not None}


def _teacher(teacher: TeacherConfig) -> dict[str, Any]:
    """The fields of the teacher that are set; a model of its own is loaded by klamp, and its prompts have a column."""
    if not teacher.there:
        return {}
    fields = [each for each in dataclasses.fields(teacher) if getattr(teacher, each.name) != each.default]
    given = {each.name: getattr(teacher, each.name) for each in fields if each.name != "teacher_model"}
    given["teacher_coef"] = teacher.teacher_coef
    return given | ({"teacher_prompt": TEACHER_PROMPT} if teacher.teacher_prompt else {})


def _left_to_klamp() -> dict[str, Any]:
    """What TRL is told so that data types, order, evaluation, logs and checkpoints are those that klamp asks for."""
    return {
        "bf16": False,
        "fp16": False,
        "disable_dropout": True,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
