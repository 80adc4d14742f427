"""A training run in words: task, model, reference, the command that continues it, the plan of `--dry_run`."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from klamp.cli.text import WIDTH
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
from klamp.tasks.base_model import base_model_folder
from klamp.training.config import TrainConfig, field_owners
from klamp.training.folders import run_folder
from klamp.training.resumed import MAY_CHANGE, check_resume, plain, read

if TYPE_CHECKING:  # imported for a dry run only
    from klamp.training.setup import Inputs

BUILTIN = "builtin"
MONITOR = "; --kl_monitor loads one, and measures the KL all the same"
"""Follows the words that there is no reference."""


def describe_task(config: TrainConfig) -> str:
    """The task of a run, in words."""
    reward = f", reward {config.task.reward}" if config.task.reward else ""
    return f"{config.task.task}{reward}"


def describe_model(config: TrainConfig) -> str:
    """The model of a run, and which of its weights are trained, in words."""
    model, name = config.model, config.model.model
    if name == BUILTIN:
        cached = base_model_folder().is_dir()
        name += f": a small Llama for arithmetic, {'cached' if cached else 'to be taught first, a few minutes'}"
    moves = f"a LoRA adapter of rank {model.lora_r} is trained" if model.lora_r else "all weights are trained"
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


def resume_command(config: TrainConfig, folder: Path, **changes: Any) -> str:
    """The command that continues a run, with the fields that differ from what its folder holds, or that change."""
    words, saved = [tool("klamp"), "train", "--resume", str(folder)], plain(config)
    wanted = {name: saved[name] for name in MAY_CHANGE} | changes
    with suppress(ConfigError):  # nothing is written yet
        saved = read(folder)
    for name, value in wanted.items():
        each = list(value) if isinstance(value, list | tuple) else [value]
        if each != (saved[name] if isinstance(saved[name], list) else [saved[name]]):
            words += [f"--{name}", *map(str, each)]
    return shlex.join(words)


def tool(name: str) -> str:
    """How to call a program of this environment: by its name where the shell finds it, else by its path."""
    beside = Path(sys.executable).parent / name
    if shutil.which(name) or not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)


def plan_text(config: TrainConfig, inputs: Inputs | None = None, argv: Sequence[str] = ()) -> str:
    """The plan of a run as text: the settings in words, then the fields that differ from the defaults.

    `inputs` are those that were opened; None: nobody tried. `argv` are the arguments of `klamp train` that `config` was
    made from.
    """
    parts = [
        "klamp train --dry-run: prompts, tokenizer and reward are opened; nothing is started or written",
        "\n".join(
            textwrap.fill(f"{name:<11} {text}", WIDTH, initial_indent="  ", subsequent_indent=" " * 14)
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


def _in_words(config: TrainConfig, inputs: Inputs | None) -> list[tuple[str, str]]:
    kl, rollout, run = config.kl, config.rollout, config.run
    per_step, length = rollout.prompts_per_step * rollout.num_generations, rollout.max_completion_length
    opened = ""
    if inputs is not None:
        opened = f"; {inputs.training} to train on, {inputs.held_out} held out; longest prompt (tokens): "
        opened += str(inputs.longest)
    going = check_resume(config, Path(run.output_dir or ""))
    lines = [("resume", f"after step {going[0]}; changed: {going[1] or 'nothing'}")] if going else []
    lines += [
        ("task", f"{describe_task(config)}{opened}"),
        ("model", describe_model(config)),
        ("reference", describe_reference(config)),
        ("teacher", describe_teacher(config.teacher)),
        ("KL", describe_kl(kl)),
        ("controller", describe_controller(kl) if kl.needs_reference else "none: it trains without KL"),
    ]
    if kl.needs_reference and config.task.reward != NO_REWARD and kl.reference != "sampler":
        size = rollout.num_generations
        price = configured_price(kl, config.loss, group_size=size, mean_length=length, max_length=length)
        lines.append(("price", describe_price(price, group_size=size)))
    completions = f"{rollout.prompts_per_step} prompts x {rollout.num_generations} completions = {per_step}"
    lines.append(("steps", f"{run.max_steps}, each {completions} of up to {length} tokens"))
    return [*lines, ("folder", str(run_folder(config)))]


def _configuration(config: TrainConfig) -> str:
    """The fields that differ from the defaults, by section, as YAML."""
    defaults, changed = TrainConfig().flat(), dict[str, dict[str, Any]]()
    for name, value in config.flat().items():
        if value != defaults[name]:
            changed.setdefault(field_owners()[name], {})[name] = list(value) if isinstance(value, tuple) else value
    if not changed:
        return "every field has its default"
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=10**6)
    return f"what differs from the defaults, as a YAML file takes it\n\n{textwrap.indent(text, '  ').rstrip()}"
