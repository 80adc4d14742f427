"""`klamp train`: parse, show, run, sum up: what it gained and kept, how far it went, where its files are."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from klamp.cli.arguments import parse_train
from klamp.cli.display import MONITOR, Display, settings, skill_rows
from klamp.cli.prepare import prepared_text
from klamp.cli.text import MISSING, WIDTH, duration, number, say, show_caution, show_table, train_command
from klamp.config.describe import describe_controller, describe_price
from klamp.config.loss import configured_price
from klamp.doctor.alarms_kl import share_in_band
from klamp.doctor.readers import read_record
from klamp.errors import TrainingStopped, missing_library
from klamp.hosts.common.versions import installed_version
from klamp.lab.backends import check_backend, engine_plan, launch, train_run
from klamp.lab.checkpoint import check_resume
from klamp.lab.config import TrainConfig
from klamp.lab.folders import checkpoint_folders, plain, policy_in, run_folder
from klamp.lab.observers import RunSummary, check_trackers
from klamp.lab.tasks.base import NO_REWARD, Task
from klamp.names import METRICS_FILE

ENGINES = {"local": set[str](), "trl": {"trl"}, "verl": {"verl", "vllm"}}
"""Backend -> the packages that it runs."""


def run(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Train, or show what would be trained; `console` draws the run as it goes, None: one for stdout."""
    config, options = parse_train(argv)
    check_backend(config)
    if options.prepare:
        say(prepared_text(argv, config))
    elif options.dry_run:
        from klamp.lab.setup import open_inputs

        if config.run.backend == "local":
            check_trackers(config)
        engines = ENGINES[config.run.backend] | ({"vllm"} if config.rollout.sampler == "vllm" else set())
        for engine in sorted(name for name in engines if installed_version(name) is None):
            show_caution(f"this run cannot start here: {engine} is not installed. {missing_library(engine, by='').fix}")
        say(plan_text(config, open_inputs(config), argv))
    elif config.run.backend != "local":
        launch(config, argv)
    else:
        _train(config, console or Console(highlight=False))
    return 0


def _train(config: TrainConfig, console: Console) -> None:
    with console.status("loading libraries") if console.is_terminal else nullcontext():  # it takes seconds
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils import logging

        import klamp.lab.loop  # noqa: F401

    logging.disable_progress_bar()  # a bar per checkpoint would tear the display apart
    enable_progress_bars()  # downloads keep theirs: they come before it
    with closing(Display(console)) as display:
        try:
            summary = train_run(config, [display])
        except TrainingStopped as stopped:
            if display.info is not None and stopped.resumable:
                left = tuple(name for name in config.run.stop_on if name not in display.raised)
                changes = {} if left == config.run.stop_on else {"stop_on": left}
                stopped.fix = f"continue with: {train_command('--resume', str(display.info.output_dir), **changes)}"
            raise
    print_summary(config, summary)


def plan_text(config: TrainConfig, task: Task | None = None, argv: Sequence[str] = ()) -> str:
    """The plan of a run as text: its settings in words, then what differs from the defaults; `argv` made `config`."""
    plan = (f"{name:<11} {text}" for name, text in _plan(config, task).items())
    lines = (textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * 14) for line in plan)
    defaults = plain(TrainConfig())
    changed = {name: value for name, value in plain(config).items() if value != defaults[name]}
    parts = [
        "klamp train --dry-run: prompts, tokenizer and reward are opened; nothing is started or written",
        "\n".join(lines),
        f"what differs from the defaults, as a YAML file takes it\n\n{_as_yaml(changed)}",
    ]
    if config.run.backend != "local":
        arguments, words = engine_plan(config, argv)
        if arguments:
            parts.append(f"the arguments of klamp.trl.GRPOConfig\n\n{_as_yaml(arguments)}")
        if words:
            parts.append(f"the command that runs it, once klamp has made the folder\n\n  {shlex.join(words)}")
    return "\n\n".join(parts)


def _plan(config: TrainConfig, task: Task | None) -> dict[str, str]:
    kl, rollout, run = config.kl, config.rollout, config.run
    size, length, lines = rollout.num_generations, rollout.max_completion_length, settings(config)
    if task is not None:
        counts = f"{len(task.train)} to train on, {len(task.held_out)} held out"
        lines["task"] += f"; {counts}; longest prompt (tokens): {task.longest}"
    if going := check_resume(config, Path(run.output_dir or "")):
        lines["resume"] = f"after step {going[0]}; changed: {going[1] or 'nothing'}"
    if kl.needs_reference and kl.beta >= 0 and config.task.reward != NO_REWARD and kl.reference != "sampler":
        price = configured_price(kl, config.loss, group_size=size, mean_length=length, max_length=length)
        lines["price"] = describe_price(price, group_size=size)
    completions = f"{rollout.prompts_per_step} prompts x {size} completions = {rollout.prompts_per_step * size}"
    lines["steps"] = f"{run.max_steps}, each {completions} of up to {length} tokens"
    return {**lines, "folder": str(run_folder(config))}


def _as_yaml(values: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=10**6)
    return textwrap.indent(text, "  ").rstrip()


ESTIMATORS = ("k1", "k3", "exact")
ROWS = {"": "nats per token", "_sequence": "nats per completion", "_original": "from its start, per token"}


def print_summary(config: TrainConfig, summary: RunSummary) -> None:
    """Print the scores and the KL before and after a run, and where its files are."""
    metrics, kl = summary.final_metrics, config.kl
    done = f"{summary.steps} steps" if summary.steps else "no step was taken (--max_steps 0); the model was evaluated,"
    say(f"\ndone: {done} in {duration(summary.seconds)}\n")
    headings = ("", "before", "after", "change")
    show_table("skill (held out)", headings, skill_rows(summary.before, summary.after, summary.rl_skill))
    say()
    values = {text: [metrics.get(f"kl/{estimator}{end}") for estimator in ESTIMATORS] for end, text in ROWS.items()}
    cells = {text: [MISSING if x is None else number(x) for x in row] for text, row in values.items()}
    rows = [(text, *row) for text, row in cells.items() if {*row} != {MISSING}]
    if rows:
        show_table("KL from the reference (last step)", ("", *ESTIMATORS), rows)
    else:
        why = "no step was taken" if kl.needs_reference else f"beta is 0, so no reference was loaded{MONITOR}"
        say(f"KL from the reference: not measured; {why}")
    if kl.needs_reference and summary.steps:
        say(f"beta: {describe_controller(kl)}; {number(metrics.get('beta', kl.beta))} in the last step")
    if "kl/target" in metrics:
        say(f"target: {_target_text(summary.output_dir)}")
    if "teacher/kl" in metrics:
        say(f"KL to the teacher (last step): {number(metrics['teacher/kl'])} nats per token")
    say()
    for name, text in _files(config, summary).items():  # not wrapped, so that a command can be copied
        say(f"{name:<12} {text}")


def _target_text(folder: Path) -> str:
    share, since = share_in_band(read_record(folder / METRICS_FILE)), "since the KL reached it"
    steps = "" if share is None else f"{100 * share:.0f} % of the steps {since}"
    return f"in the band (mean of 20 steps within 30 %) for {steps}" if steps else f"fewer than 20 steps {since}"


def _files(config: TrainConfig, summary: RunSummary) -> dict[str, str]:
    """The paths of the run's files that exist, and the commands that go on from here."""
    folder, saved = summary.output_dir, checkpoint_folders(summary.output_dir)
    lines = {"run": str(folder)}
    for name in ("metrics", "completions"):
        lines |= {name: str(file)} if (file := folder / f"{name}.jsonl").exists() else {}
    if saved:
        lines["checkpoints"] = f"{saved[-1].parent}: {', '.join(path.name for path in saved)}"
        auto = "AutoPeftModelForCausalLM" if config.model.lora_r else "AutoModelForCausalLM"
        lines["load it"] = f'{auto}.from_pretrained("{policy_in(saved[-1])}")'
    if "tensorboard" in config.run.report_to:
        lines["TensorBoard"] = f"tensorboard --logdir {folder}"
    lines["look at it"] = f"klamp report {folder}"
    if saved:
        lines["continue"] = train_command("--resume", str(folder), max_steps=max(1, 2 * summary.steps))
    return lines
