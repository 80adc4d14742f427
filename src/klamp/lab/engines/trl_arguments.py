"""The arguments of `klamp.trl.GRPOConfig` that a run's configuration means; nothing of TRL is loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.config import LossConfig
from klamp.config.loss import MASKS, LossType
from klamp.lab.config import ModelConfig, RolloutConfig, TrainConfig
from klamp.lab.models import model_path
from klamp.lab.sizing import part_size, started_processes
from klamp.lab.tasks.base import NO_REWARD

TEACHER_PROMPT = "klamp_teacher_prompt"  # the column with the teacher's prompt
LOSS_TYPES: Mapping[LossType, str] = {"dapo": "dapo", "grpo": "grpo", "dr_grpo": "dr_grpo", "bnpo": "dapo"}
"""klamp's loss type -> TRL's with an equal average; TRL's bnpo divides each micro-batch by its own tokens."""
SAME = (
    *("seed", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "num_iterations"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "num_generations", "max_completion_length"),
    *("temperature", "top_p", "top_k", "mask_truncated_completions", "off_policy_mask_threshold"),
)
"""Fields with equal names in TRL."""


def trl_arguments(config: TrainConfig, folder: Path, *, processes: int | None = None) -> dict[str, Any]:
    """The arguments of a run; those that are left out keep TRL's defaults. TRL's steps are updates.

    `processes` share a step; None: as many as a launcher has started.
    """
    optim, run, fields = config.optim, config.run, config.flat()
    processes = processes or started_processes()
    part, group = part_size(config, processes), config.rollout.num_generations
    return {
        "output_dir": str(folder),
        **{name: fields[name] for name in SAME},
        "max_steps": run.max_steps * optim.num_iterations,
        "use_cpu": run.cpu,
        "per_device_train_batch_size": part,
        "per_device_eval_batch_size": group * max(1, part // group),
        "steps_per_generation": optim.gradient_accumulation_steps,
        "lr_scheduler_type": optim.lr_scheduler_type.replace("constant", "constant_with_warmup"),
        "warmup_steps": min(optim.warmup_steps, run.max_steps) * optim.num_iterations,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": list(run.report_to) or "none",
        "eval_strategy": "steps",
        "eval_on_start": not run.resume,
        "eval_steps": (run.eval_every or run.max_steps) * optim.num_iterations,
        "save_strategy": "steps",
        "save_steps": (run.save_every or run.max_steps) * optim.num_iterations,
        "save_total_limit": run.keep_checkpoints,
        "disable_dropout": True,
        "shuffle_dataset": False,  # the rows of all steps, in klamp's order
        **_precision(config.model),
        **_sampler(config.rollout),
        **_loss(config.loss),
        **_anchors(config),
        **({"reward_weights": [0.0]} if config.task.reward == NO_REWARD else {}),
    }


def weights_dtype(model: ModelConfig) -> str:
    """The data type that the weights are loaded in; float32 copies of bfloat16 weights are float32 weights in TRL."""
    copies = model.dtype == "bfloat16" and model.master_weights == "float32" and not model.lora_r
    return "float32" if copies else model.dtype


def _precision(model: ModelConfig) -> dict[str, Any]:
    """Float32 weights computed in bfloat16 are TRL's `bf16`, which a launcher can ask for too."""
    launcher = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    mixed = model.dtype != weights_dtype(model) or (launcher and model.dtype == "float32")
    checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if model.gradient_checkpointing else {}
    return {"bf16": mixed, "fp16": False, **checkpointing}


def _sampler(rollout: RolloutConfig) -> dict[str, Any]:
    if rollout.sampler_url is not None:
        return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": rollout.sampler_url}
    return {"use_vllm": True, "vllm_mode": "colocate"} if rollout.sampler == "vllm" else {"use_vllm": False}


def _loss(loss: LossConfig) -> dict[str, Any]:
    """The policy loss; the trust region to the sampler has TRL's names or klamp.trl's; without a mode TRL's default."""
    values: dict[str, Any] = {"scale_rewards": "group" if loss.scale == "std" else "none"}
    if loss.vllm_importance_sampling_mode is not None:
        names = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
        values |= {name: getattr(loss, name) for name in names} | {"vllm_importance_sampling_correction": True}
    values |= {name: x for name in MASKS if (x := getattr(loss, name)) != getattr(LossConfig, name)}
    if loss.surrogate == "cispo":
        return values | {"loss_type": "cispo", "epsilon_high": 1 + loss.clip_high}  # TRL's is the bound itself
    return values | {"loss_type": LOSS_TYPES[loss.loss_type], "epsilon": loss.epsilon, "epsilon_high": loss.clip_high}


def _anchors(config: TrainConfig) -> dict[str, Any]:
    """The fields of the KL and of a teacher that are set; without a KL beta 0 alone, so that TRL loads no reference."""
    kl, teacher = dataclasses.asdict(config.kl), config.teacher
    values = {name: value for name, value in kl.items() if value is not None} if config.kl.needs_reference else {}
    values |= {"beta": config.kl.beta if values else 0.0}
    if not teacher.there:
        return values
    changed = [field for field in dataclasses.fields(teacher) if getattr(teacher, field.name) != field.default]
    values |= {field.name: getattr(teacher, field.name) for field in changed} | {"teacher_coef": teacher.teacher_coef}
    values |= {"teacher_model": model_path(teacher.teacher_model)} if teacher.teacher_model else {}
    return values | ({"teacher_prompt": TEACHER_PROMPT} if teacher.teacher_prompt else {})
