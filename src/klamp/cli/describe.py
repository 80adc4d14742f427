"""A training run in words: task, model, reference, the command that continues it, the plan of `--dry_run`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from klamp.cli.text import room
from klamp.config.describe import (
    describe_controller,
    describe_kl,
    describe_movement,
    describe_price,
    describe_teacher,
)
from klamp.config.loss import configured_price
from klamp.errors import ConfigError
from klamp.tasks.base import NO_REWARD
from klamp.tasks.base_model import BaseModelConfig, base_model_folder
from klamp.training.config import TrainConfig, field_owners
from klamp.training.folders import run_folder
from klamp.training.resumed import PLACE, check_resume, plain, read

if TYPE_CHECKING:  # imported for a dry run only
    from klamp.training.setup import Inputs

BUILTIN = "builtin"


def describe_task(config: TrainConfig) -> str:
    """The task of a run, in words."""
    reward = f", reward {config.task.reward}" if config.task.reward else ""
    return f"{config.task.task}{reward}"


def describe_model(config: TrainConfig) -> str:
    """The model of a run, and which of its weights are trained, in words."""
    model = config.model
    name = model.model
    if name == BUILTIN:
        cached = base_model_folder(BaseModelConfig()).is_dir()
        state = "cached" if cached else "not cached yet: taught first, a few minutes"
        name = f"builtin: a small Llama for arithmetic ({state})"
    moves = f"a LoRA adapter of rank {model.lora_r} is trained" if model.lora_r else "all weights are trained"
    copies = {"float32": "on float32 copies", "none": "without float32 copies"}[model.master_weights]
    moves += f" {copies}" if model.dtype == "bfloat16" and not model.lora_r else ""
    return f"{name}; {model.dtype}, {moves}"


def describe_reference(config: TrainConfig) -> str:
    """The reference of a run and where it comes from, in words."""
    kl, model = config.kl, config.model
    if not kl.needs_reference:
        return f"none: beta is 0, so no reference is loaded{MONITOR}"
    adapter = "adapter_off" if model.lora_r and model.ref_model is None else "frozen"
    return {
        "frozen": f"{model.ref_model}, frozen" if model.ref_model else "a frozen copy of the starting policy",
        "adapter_off": "the policy with its adapter off",
        "ema": f"a copy that {describe_movement(kl)}",
        "periodic": f"a copy that {describe_movement(kl)}",
        "remote": f"{kl.reference_name or 'another machine'}: {kl.reference_url}",
        "sampler": "who sampled the completions, so that each update stays near them",
    }[adapter if kl.reference == "auto" else kl.reference]


MONITOR = "; --kl_monitor loads one, and measures the KL all the same"
"""What is said behind the words that there is no reference."""
LAUNCHED = ("ACCELERATE_", "FSDP_")
"""How variables begin by which `accelerate launch` tells its processes of DeepSpeed and FSDP."""


def resume_command(config: TrainConfig, folder: Path, **changes: Any) -> str:
    """The command that continues a run: as it is, and what is to be another.

    Args:
        config: the configuration in force.
        folder: folder of the run.
        changes: fields to set, such as `max_steps`.
    """
    wanted = plain(config) | {name: list(v) if isinstance(v, tuple) else v for name, v in changes.items()}
    written: dict[str, Any] = {}
    with suppress(ConfigError):  # damaged
        written = read(folder)
    words = [*_program(), "train", "--resume", str(folder)]
    for name, value in wanted.items():
        if name not in PLACE and value != written.get(name, value):
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
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
        told = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(LAUNCHED)]
        return [*(["env", *told] if told else []), tool("torchrun"), "--nproc_per_node", processes, "-m", "klamp.cli"]
    return [tool("klamp")]


def plan_text(config: TrainConfig, inputs: Inputs | str = "", argv: Sequence[str] = ()) -> str:
    """The plan of a run as text: the settings in words, then the fields that differ from the defaults.

    Args:
        config: what would run.
        inputs: what was found when its inputs were opened, or why they could not be; empty: nobody tried.
        argv: the arguments of `klamp train` that it was made from.

    Raises:
        RunFolderError: the run's folder holds another run, or there is none to continue.
    """
    parts = [
        "klamp train --dry-run: prompts, tokenizer and reward are opened; nothing is started or written",
        "\n".join(
            textwrap.fill(f"{name:<11} {text}", room(), initial_indent="  ", subsequent_indent=" " * 14)
            for name, text in _in_words(config, inputs)
        ),
        _configuration(config),
    ]
    if config.run.backend != "local":
        from klamp.training.launch import engine_plan

        arguments, words = engine_plan(config, argv)
        if arguments:
            parts.append("the arguments of klamp.trl.GRPOConfig")
            parts.append(textwrap.indent(yaml.safe_dump(arguments, sort_keys=False, width=10**6), "  ").rstrip())
        if words:
            parts.append("the command that runs it, once klamp has made the folder")
            parts.append(f"  {shlex.join(words)}")
    return "\n\n".join(parts)


def _in_words(config: TrainConfig, inputs: Inputs | str) -> list[tuple[str, str]]:
    rollout, optim, run = config.rollout, config.optim, config.run
    per_step = rollout.prompts_per_step * rollout.num_generations
    evaluated = f"every {run.eval_every} steps, " if run.eval_every else ""
    saved = f"every {run.save_every} steps and " if run.save_every else ""
    trackers = ", ".join(run.report_to) or "none"
    if isinstance(inputs, str):
        opened = inputs and f"; not opened: {inputs}"
    else:
        found = f"{inputs.training} to train on, {inputs.held_out} held out"
        opened = f"; {found}; longest prompt (tokens): {inputs.longest}"
    going = check_resume(config, Path(run.output_dir or ""))
    return [
        *([("resume", f"after step {going[0]}; changed: {going[1] or 'nothing'}")] if going else []),
        ("task", f"{describe_task(config)}{opened}"),
        ("model", describe_model(config)),
        ("reference", describe_reference(config)),
        ("teacher", describe_teacher(config.teacher)),
        ("KL", describe_kl(config.kl)),
        *_beta_lines(config),
        ("loss", _loss(config)),
        (
            "steps",
            f"{run.max_steps}, each {rollout.prompts_per_step} prompts x {rollout.num_generations} completions "
            f"= {per_step} of up to {rollout.max_completion_length} tokens; {run.max_steps * per_step:,} in all",
        ),
        (
            "updates",
            f"{optim.num_iterations} per step; learning rate {optim.learning_rate:g}, {optim.lr_scheduler_type}, "
            f"after {optim.warmup_steps} steps of warm-up",
        ),
        ("evaluation", f"before, {evaluated}after; up to {config.task.eval_size} held-out prompts per skill, greedy"),
        ("folder", f"{run_folder(config)}; checkpoints {saved}at the end, trackers: {trackers}"),
    ]


def _beta_lines(config: TrainConfig) -> list[tuple[str, str]]:
    kl, rollout = config.kl, config.rollout
    if not kl.needs_reference:
        return [("beta", "0: trains without KL")]
    if config.task.reward == NO_REWARD or kl.reference == "sampler":  # nothing that a nat could be paid in, or for
        return [("controller", describe_controller(kl))]
    length = rollout.max_completion_length
    price = configured_price(kl, config.loss, group_size=rollout.num_generations, mean_length=length, max_length=length)
    worded = describe_price(price, group_size=rollout.num_generations)
    return [("controller", describe_controller(kl)), ("price", worded)]


def _loss(config: TrainConfig) -> str:
    loss = config.loss
    bounds = "" if loss.surrogate == "score_function" else f", ratio in {1 - loss.epsilon:g} to {1 + loss.clip_high:g}"
    scaled = "divided by the group's std" if loss.scale == "std" else "not scaled"
    return f"{loss.loss_type} ({loss.surrogate}{bounds}); advantages against the {loss.advantage_baseline}, {scaled}"


def _configuration(config: TrainConfig) -> str:
    """The fields that differ from the defaults, by section, as YAML."""
    defaults = TrainConfig().flat()
    changed: dict[str, dict[str, Any]] = {}
    for name, value in config.flat().items():
        if value != defaults[name]:
            plain = list(value) if isinstance(value, tuple) else value
            changed.setdefault(field_owners()[name], {})[name] = plain
    if not changed:
        return "every field has its default"
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=10**6)
    return f"what differs from the defaults, as a YAML file takes it\n\n{textwrap.indent(text, '  ').rstrip()}"
