"""`klamp train --dry-run`: what would run, in words and in full; nothing is started, loaded or written."""

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
from klamp.config.price import configured_price
from klamp.training.config import TrainConfig, section_classes
from klamp.training.folders import run_folder
from klamp.training.in_trl.arguments import trl_arguments
from klamp.training.in_verl.overrides import command

WIDTH = 100


def plan_text(request: TrainRequest) -> str:
    """The plan of a run as text: the settings in words, then every field.

    Raises:
        RunFolderError: the run's folder holds another run, or there is none to continue.
    """
    words = "\n".join(_line(name, text) for name, text in _in_words(request.config))
    return (
        "klamp train --dry-run: nothing is started, loaded or written\n\n"
        f"{words}\n\n"
        "configuration, as a YAML file takes it; #* marks what differs from the default\n\n"
        f"{_configuration(request)}"
        f"{_for_trl(request) if request.config.run.backend == 'trl' else ''}"
        f"{_for_verl(request) if request.config.run.backend == 'verl' else ''}"
    )


def _line(name: str, text: str) -> str:
    return textwrap.fill(f"{name:<11} {text}", WIDTH, initial_indent="  ", subsequent_indent=" " * 14)


def _in_words(config: TrainConfig) -> list[tuple[str, str]]:
    rollout, optim, run = config.rollout, config.optim, config.run
    per_step = rollout.prompts_per_step * rollout.num_generations
    evaluated = f"every {run.eval_every} steps, " if run.eval_every else ""
    saved = f"every {run.save_every} steps and " if run.save_every else ""
    prompts = f"at most {config.task.train_size}" if config.task.train_size else "all"
    return [
        ("task", f"{describe_task(config)}; {prompts} prompts"),
        ("model", describe_model(config)),
        *(
            [("backend", describe_backend(config))]
            if run.backend in ("trl", "verl") or rollout.sampler != "own"
            else []
        ),
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
    defaults = TrainConfig().flat()
    lines: list[str] = []
    values = request.config.flat()
    for section, cls in section_classes().items():
        lines.append(f"  # {section}")
        names = [field.name for field in dataclasses.fields(cls)]
        lines += [_entry(name, values[name], defaults[name], request) for name in names]
    return "\n".join(lines)


def _for_trl(request: TrainRequest) -> str:
    """What TRL would be told by one process, and how to start several."""
    config = request.config
    told = trl_arguments(config, run_folder(config), processes=1, exact=config.run.exact_kl_completions)
    words = [word for word in request.argv if word.replace("-", "_") != "__dry_run"]
    command = shlex.join(
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m", "klamp.cli", "train", *words]
    )
    return (
        "\n\narguments of klamp.trl.GRPOConfig in a single process\n\n"
        + "\n".join(f"  {name}: {_yaml(value)}" for name, value in told.items())
        + f"\n\nin two processes\n\n  {command}"
    )


def _for_verl(request: TrainRequest) -> str:
    """The whole command of verl, and the one that writes what it reads, both ready to be pasted."""
    config = request.config
    folder = run_folder(config)
    words = [word for word in request.argv if word.replace("-", "_") != "__dry_run"]
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
    mark = "#*" if value != default else "# "
    entry = f"  {name}: {_yaml(value)}"
    return f"{entry:<44} {mark} {', '.join(notes)}" if notes else entry


def _yaml(value: Any) -> str:
    """A value as it stands in a YAML file, in one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump([plain], default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text[1:-1]


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
