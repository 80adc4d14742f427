"""A configuration in words: the model, the reference, the KL, the controller, beta's units, the command to continue."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from klamp.config import LOSS_TYPES, KLConfig
from klamp.tasks.base_model import base_model_folder
from klamp.tasks.filler import builtin_model
from klamp.training.config import TrainConfig

BUILTIN = "builtin"


def describe_task(config: TrainConfig) -> str:
    """What is trained on."""
    reward = f", reward {config.task.reward}" if config.task.reward else ""
    return f"{config.task.task}{reward}"


def describe_model(config: TrainConfig) -> str:
    """Which model, and which of its weights move."""
    model = config.model
    if config.run.backend == "tinker":
        return f"{model.model} at the Tinker service; a LoRA adapter of rank {model.lora_r or 32} is trained"
    name = model.model
    if name == BUILTIN:
        cached = base_model_folder(builtin_model(config.task.task)).is_dir()
        state = "cached" if cached else "not cached yet: taught first, a few minutes"
        name = f"builtin: a small Llama for arithmetic ({state})"
    moves = f"a LoRA adapter of rank {model.lora_r} is trained" if model.lora_r else "all weights are trained"
    return f"{name}; {model.dtype}, {moves}"


def describe_reference(config: TrainConfig) -> str:
    """Where the reference comes from."""
    kl, model = config.kl, config.model
    if not kl.needs_reference:
        return "none: beta is 0, so no reference is loaded"
    if config.run.backend == "tinker":
        return f"{model.ref_model or model.model} at the Tinker service, frozen"
    adapter = "adapter_off" if model.lora_r and model.ref_model is None else "frozen"
    return {
        "frozen": f"{model.ref_model}, frozen" if model.ref_model else "a frozen copy of the starting policy",
        "adapter_off": "the policy with its adapter off",
        "ema": f"a copy that follows the policy, keeping {kl.reference_decay:g} of itself at every step",
        "periodic": f"a copy that becomes the policy every {kl.reference_reset_steps} steps",
        "remote": f"another machine: {kl.reference_url}",
    }[adapter if kl.reference == "auto" else kl.reference]


def describe_kl(config: TrainConfig) -> str:
    """What is measured, which gradient flows, where it enters, how it is clipped."""
    kl = config.kl
    if not kl.needs_reference:
        return "none: beta is 0"
    if kl.beta == 0 and kl.controller_name == "fixed":
        return "measured and logged only: beta is 0"
    place = {"loss": "in the loss", "reward": "taken from the reward", "advantage": "taken from the advantage"}
    gradient = f"gradient {kl.kl_gradient}" + (" over the sequence" if kl.kl_horizon == "sequence" else " per token")
    clip = "" if kl.kl_clip_method == "none" else f"; {_describe_clip(kl)}"
    return f"{kl.kl_estimator}, {gradient}, {place[kl.kl_placement]}{clip}"


def _describe_clip(kl: KLConfig) -> str:
    if not kl.use_per_token_kl_threshold:
        budget = f"{kl.kl_clip_threshold:g} nats per completion"
    elif kl.kl_reference_length is not None:
        budget = f"{kl.kl_clip_threshold:g} nats x {kl.kl_reference_length} tokens"
    else:
        budget = f"{kl.kl_clip_threshold:g} nats per token of the reference length"
    return f"{kl.kl_clip_method} clip at {budget}"


def describe_controller(config: TrainConfig) -> str:
    """What holds beta."""
    kl = config.kl
    if kl.controller_name == "fixed":
        scheduled = "" if kl.kl_schedule == "constant" and not kl.kl_warmup_steps else ", scaled by its schedule"
        return f"fixed at {kl.beta:g}{scheduled}"
    return f"{kl.controller_name} controller from {kl.beta:g}, towards {kl.target_kl:g} nats per token"


def describe_rule(config: TrainConfig) -> str:
    """How beta moves; empty where it does not."""
    kl = config.kl
    if kl.controller_name == "fixed":
        return ""
    bounds = f"{kl.beta_min:g} to {'no bound' if kl.beta_max is None else f'{kl.beta_max:g}'}"
    rule = {
        "step": "x1.5 when the KL is above 1.5 targets, x0.75 when it is below half of one",
        "proportional": f"in proportion to the error, over {kl.kl_controller_horizon} updates",
        "dual": f"dual ascent, step {kl.kl_controller_lr:g}",
        "pid": "kp, ki, kd = " + ", ".join(f"{gain:g}" for gain in kl.kl_controller_gains),
    }[kl.controller_name]
    return f"{rule}; bounds {bounds}"


def beta_units(config: TrainConfig) -> tuple[float, float]:
    """beta as a coefficient of the KL (per token, per whole completion) of the longest completions.

    The first is what a nat of the mean token costs, the second what a nat of the completion's total costs.
    """
    kl, length = config.kl, config.rollout.max_completion_length
    reduction = kl.kl_normalizer or LOSS_TYPES[config.loss.loss_type].reduction
    if kl.kl_placement == "loss" and reduction != "sequence_sum":
        return kl.beta, kl.beta / length
    return kl.beta * length, kl.beta


def resume_command(config: TrainConfig, folder: Path, **changes: Any) -> str:
    """The command that continues a run: its own configuration, and what has changed since that was written.

    Args:
        config: the configuration in force.
        folder: folder of the run.
        changes: fields to set, such as `max_steps`.
    """
    file = folder / "config.yaml"
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError:
        written = {}
    wanted = {name: list(v) if isinstance(v, tuple) else v for name, v in (config.flat() | changes).items()}
    differing = [n for n, v in wanted.items() if n not in ("output_dir", "resume") and n in written and v != written[n]]
    words = [*_program(), "train", "--config", str(file), "--output_dir", str(folder), "--resume"]
    for name in differing:
        values = wanted[name] if isinstance(wanted[name], list) else [wanted[name]]
        words += [f"--{name}", *map(str, values)]
    return shlex.join(words)


def tool(name: str) -> str:
    """How to call a program of this environment: by its name where the shell finds it, else by its path."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def _program() -> list[str]:
    processes = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    if int(processes) > 1:  # `accelerate launch` starts several processes on GPUs only, torchrun anywhere
        return [tool("torchrun"), "--nproc_per_node", processes, "-m", "klamp.cli"]
    return [tool("klamp")]
