"""`klamp train --dry-run`: what would run, in words and fields; inputs are opened, nothing is started or written."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from klamp.cli.arguments import TrainRequest
from klamp.cli.describe import describe_backend, describe_model, describe_reference, describe_task, tool
from klamp.config.describe import (
    describe_controller,
    describe_kl,
    describe_price,
    describe_rule,
)
from klamp.config.loss import configured_price
from klamp.errors import without_credentials
from klamp.training.config import TrainConfig, section_classes
from klamp.training.folders import run_folder
from klamp.training.in_trl.arguments import trl_arguments
from klamp.training.in_verl.overrides import command
from klamp.training.inputs import Inputs

WIDTH = 100
OWN = ("__dry_run", "__all")
"""Flags that belong to the dry run alone, not to the commands that it prints."""


def plan_text(request: TrainRequest, inputs: Inputs | str = "") -> str:
    """The plan of a run as text: the settings in words, then the fields that differ from the defaults, or all of them.

    Args:
        request: what would run.
        inputs: what was found when its inputs were opened, or why they could not be; empty: nobody tried.

    Raises:
        RunFolderError: the run's folder holds another run, or there is none to continue.
    """
    words = "\n".join(_line(name, text) for name, text in _in_words(request.config, inputs))
    return (
        "klamp train --dry-run: prompts, tokenizer and reward are opened; nothing is started or written\n\n"
        f"{words}\n\n"
        f"{_configuration(request)}"
        f"{_for_trl(request) if request.config.run.backend == 'trl' else ''}"
        f"{_for_verl(request) if request.config.run.backend == 'verl' else ''}"
    )


def _line(name: str, text: str) -> str:
    return textwrap.fill(f"{name:<11} {text}", WIDTH, initial_indent="  ", subsequent_indent=" " * 14)


def _in_words(config: TrainConfig, inputs: Inputs | str) -> list[tuple[str, str]]:
    rollout, optim, run = config.rollout, config.optim, config.run
    per_step = rollout.prompts_per_step * rollout.num_generations
    evaluated = f"every {run.eval_every} steps, " if run.eval_every else ""
    saved = f"every {run.save_every} steps and " if run.save_every else ""
    return [
        ("task", f"{describe_task(config)}; {_prompts(config, inputs)}"),
        ("model", describe_model(config)),
        *([("backend", describe_backend(config))] if run.backend in ("trl", "verl") else []),
        ("reference", describe_reference(config)),
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
        ("folder", f"{run_folder(config)}; checkpoints {saved}at the end, trackers: {_names(run.report_to)}"),
    ]


def _prompts(config: TrainConfig, inputs: Inputs | str) -> str:
    if isinstance(inputs, Inputs):
        return f"{inputs.training} to train on, {inputs.held_out} held out; longest prompt (tokens): {inputs.longest}"
    prompts = f"at most {config.task.train_size} prompts" if config.task.train_size else "all prompts"
    return f"{prompts}, not opened: {inputs}" if inputs else prompts


def _beta_lines(config: TrainConfig) -> list[tuple[str, str]]:
    kl, rollout = config.kl, config.rollout
    if not kl.needs_reference:
        return [("beta", "0: trains without KL")]
    length = rollout.max_completion_length
    price = configured_price(kl, config.loss, group_size=rollout.num_generations, mean_length=length, max_length=length)
    controller = "; ".join(text for text in (describe_controller(kl), describe_rule(kl)) if text)
    return [("controller", controller), ("price", describe_price(price, group_size=rollout.num_generations))]


def _loss(config: TrainConfig) -> str:
    loss = config.loss
    bounds = "" if loss.surrogate == "score_function" else f", ratio in {1 - loss.epsilon:g} to {1 + loss.clip_high:g}"
    scaled = "divided by the group's std" if loss.scale == "std" else "not scaled"
    return f"{loss.loss_type} ({loss.surrogate}{bounds}); advantages against the {loss.advantage_baseline}, {scaled}"


def _configuration(request: TrainRequest) -> str:
    defaults, values = TrainConfig().flat(), request.config.flat()
    every = request.options.all
    lines: list[str] = []
    for section, cls in section_classes().items():
        names = [field.name for field in dataclasses.fields(cls)]
        shown = [name for name in names if every or values[name] != defaults[name]]
        lines += [f"  # {section}"] if shown else []
        lines += [_entry(name, values[name], defaults[name], request) for name in shown]
    title = {
        (True, True): "every field, as a YAML file takes it; #* marks what differs from the default",
        (False, True): "what differs from the defaults, as a YAML file takes it; --all shows every field",
        (False, False): "every field has its default; --all shows them",
    }[every, bool(lines)]
    return "\n\n".join([title, "\n".join(lines)] if lines else [title])


def _for_trl(request: TrainRequest) -> str:
    """What TRL would be told by one process, and how to start several."""
    config = request.config
    told = trl_arguments(config, run_folder(config), processes=1, exact=config.run.exact_kl_completions)
    words = _repeated(request)
    command = shlex.join(
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m", "klamp.cli", "train", *words]
    )
    return (
        "\n\narguments of klamp.trl.GRPOConfig in a single process\n\n"
        + "\n".join(f"  {name}: {_yaml(value)}" for name, value in told.items())
        + f"\n\nin two processes\n\n  {command}"
    )


def _repeated(request: TrainRequest) -> list[str]:
    """The words of the command but those of the dry run, without the credentials of URLs."""
    return [without_credentials(word) for word in request.argv if word.replace("-", "_") not in OWN]


def _for_verl(request: TrainRequest) -> str:
    """The whole command of verl, and the one that writes what it reads, both ready to be pasted."""
    config = request.config
    folder = run_folder(config)
    words = _repeated(request)
    named = [] if config.run.output_dir else ["--output_dir", str(folder)]
    first = shlex.join([tool("klamp"), "train", *words, *named, "--prepare"])
    whole = " \\\n    ".join(_shell(command(config, folder, "python")))
    return f"\n\nwrite what verl reads\n\n  {first}\n\nrun verl\n\n  {whole}"


def _shell(words: Sequence[str]) -> list[str]:
    """A command for a shell, the program in the first line and one argument in each that follows."""
    quoted = [_double_quoted(word) if "'" in word else shlex.quote(word) for word in words]
    return [" ".join(quoted[:3]), *quoted[3:]]


def _double_quoted(word: str) -> str:
    """A word that holds single quotes, readable: between double quotes, where nothing in it means something there."""
    return shlex.quote(word) if set(word) & set('"$`\\!') else f'"{word}"'


def _entry(name: str, value: Any, default: Any, request: TrainRequest) -> str:
    """One field as a line of YAML; a comment says who set it, and its default where that differs."""
    source = request.sources.get(name)
    notes = [f"by {source}"] if source else []
    notes += [f"default {_yaml(default)}"] if value != default else []
    mark = "#*" if value != default and request.options.all else "# "
    entry = f"  {name}: {_yaml(value)}"
    return f"{entry:<44} {mark} {', '.join(notes)}" if notes else entry


def _yaml(value: Any) -> str:
    """A value as it stands in a YAML file, in one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump([plain], default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text[1:-1]


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
