"""`klamp train`: parse, show, run, sum up: what it gained and kept, how far it went, where its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from klamp.cli.arguments import TrainRequest, parse_train
from klamp.cli.describe import MONITOR, plan_text, resume_command, tool
from klamp.cli.display import Display, skill_rows
from klamp.cli.prepare import prepared_text
from klamp.cli.text import MISSING, duration, fixed, is_main_process, say, show_table
from klamp.config.describe import describe_controller, describe_price
from klamp.config.loss import configured_price
from klamp.errors import TrainingStopped
from klamp.tasks.base import NO_REWARD
from klamp.training.backends import Runner, check_backend, train_run
from klamp.training.config import TrainConfig
from klamp.training.folders import checkpoint_folders
from klamp.training.observers import RunInfo, RunSummary


def run(argv: Sequence[str], *, console: Console | None = None, runner: Runner | None = None) -> int:
    """Train, or show what would be trained.

    Args:
        argv: the arguments after `train`.
        console: draws the run as it goes; None: one for stdout.
        runner: what trains; None: `train_run` of `klamp.training.backends`.

    Raises:
        KlampError: whatever stops the run.
    """
    request = parse_train(argv)
    check_backend(request.config)
    if request.options.prepare:
        say(prepared_text(argv, request.config))
    elif request.options.dry_run:
        from klamp.training.setup import open_inputs

        text = plan_text(request.config, open_inputs(request.config), argv)
        if is_main_process():
            say(text)
    elif request.config.run.backend != "local":
        from klamp.training.launch import launch

        launch(request.config, argv)
    else:
        _train(request, console or Console(highlight=False), runner)
    return 0


def _train(request: TrainRequest, console: Console, runner: Runner | None) -> None:
    display = Display(console)
    try:
        summary = (runner or _trainer(console))(request.config, [display])
    except TrainingStopped as stopped:
        if display.info is not None and stopped.resumable:
            left = tuple(name for name in request.config.run.stop_on if name not in display.raised)
            command = resume_command(request.config, display.info.output_dir, stop_on=left)
            stopped.fix = f"continue with: {command}"
        raise
    except KeyboardInterrupt as stop:
        raise _stopped(request.config, display.info) or stop from stop
    finally:
        display.close()
    if is_main_process():
        print_summary(request.config, summary)


def _stopped(config: TrainConfig, info: RunInfo | None) -> TrainingStopped | None:
    """The error of an interrupt before the first step that a process takes, or after its last; None: nothing is saved.

    Args:
        config: of the run.
        info: what was known before the first step; None: it was still loading.
    """
    loading = config.run.output_dir if config.run.resume else None
    folder = Path(loading or "") if info is None else info.output_dir
    saved = checkpoint_folders(folder) if info is not None or loading else []
    if not saved:
        return None
    return TrainingStopped(
        "the run was stopped while no step was under way",
        got="an interrupt",
        resumable=True,
        why=f"its newest checkpoint, {saved[-1]}, is as it was",
        fix=f"continue with: {resume_command(config, folder, stop_on=config.run.stop_on)}",
    )


def _trainer(console: Console) -> Runner:
    """What trains, once its libraries are loaded; says on a terminal that they are, which takes seconds."""
    waiting = console.status("loading libraries") if console.is_terminal and is_main_process() else nullcontext()
    with waiting:
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils import logging

        import klamp.training.trainer  # noqa: F401

        logging.disable_progress_bar()  # a bar per checkpoint would tear the display apart
        enable_progress_bars()  # downloads keep theirs: they come before it
    return train_run


ESTIMATORS = ("k1", "k3", "exact")
ROWS = {"": "nats per token", "_sequence": "nats per completion", "_original": "from its start, per token"}


def print_summary(config: TrainConfig, summary: RunSummary) -> None:
    """Print the summary of a finished run: scores before and after, KL and beta, files.

    Args:
        config: the run's configuration.
        summary: what the trainer returned.
    """
    none = "no step was taken (--max_steps 0); the model was evaluated as it is,"
    done = f"{summary.steps} steps" if summary.steps else none
    say(f"\ndone: {done} in {duration(summary.seconds)}\n")
    headings = ("", "before", "after", "change")
    show_table("skill (held out)", headings, skill_rows(summary.before, summary.after, summary.rl_skill))
    say()
    if not summary.steps:
        say("KL from the reference: not measured; that is done in each step, and none was taken")
    elif config.kl.reference == "sampler" and config.kl.beta > 0:
        moved = summary.final_metrics.get("policy/kl_old", 0.0)
        say(f"KL from the sampler (last update): {moved:.4f} nats per token; beta: {describe_controller(config.kl)}")
    elif config.kl.needs_reference:
        metrics = summary.final_metrics
        show_table("KL from the reference (last step)", ("", *ESTIMATORS), _kl_rows(metrics))
        say(_beta_text(config, metrics))
    else:
        say(f"KL from the reference: not measured; beta is 0, so no reference was loaded{MONITOR}")
    if "teacher/kl" in summary.final_metrics:
        measured, end = summary.final_metrics["teacher/kl"], summary.final_metrics.get("teacher/end")
        ends = "" if end is None else f"; it gives the policy's ends a probability of {end:.3f}"
        say(f"KL to the teacher (last step): {measured:.4f} nats per token{ends}")
    say()
    for name, text in _files(config, summary):  # not wrapped, so that a command can be copied
        say(f"{name:<12} {text}")


def _kl_rows(metrics: Mapping[str, float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for suffix, name in ROWS.items():
        names = [f"kl/{estimator}{suffix}" for estimator in ESTIMATORS]
        if suffix != "_original" or metrics.keys() & names:  # only a moving reference has left its start
            rows.append((name, *(fixed(4)(metrics[each]) if each in metrics else MISSING for each in names)))
    return rows


def _beta_text(config: TrainConfig, metrics: Mapping[str, float]) -> str:
    kl, beta = config.kl, metrics.get("beta", config.kl.beta)
    held = "fixed" if kl.controller_name == "fixed" else describe_controller(kl)
    if "length/mean" not in metrics or config.task.reward == NO_REWARD:
        return f"beta: {beta:.3g} ({held})"
    price = configured_price(
        kl,
        config.loss,
        group_size=config.rollout.num_generations,
        mean_length=metrics["length/mean"],
        max_length=config.rollout.max_completion_length,
        beta=beta,
    )
    return f"beta: {describe_controller(kl)}; price: {describe_price(price, group_size=config.rollout.num_generations)}"


def _files(config: TrainConfig, summary: RunSummary) -> list[tuple[str, str]]:
    """The paths of the run's files; only files that exist are named."""
    folder = summary.output_dir
    lines = [("run", f"{folder}")]
    for name, file in (("metrics", "metrics.jsonl"), ("completions", "completions.jsonl")):
        if (folder / file).exists():
            lines.append((name, str(folder / file)))
    saved = checkpoint_folders(folder)
    if saved:
        lines.append(("checkpoints", f"{saved[-1].parent}: {', '.join(path.name for path in saved)}"))
    if "tensorboard" in config.run.report_to:
        lines.append(("TensorBoard", f"{tool('tensorboard')} --logdir {folder}"))
    lines.append(("look at it", f"{tool('klamp')} report {folder}"))
    if saved:
        more = max(1, 2 * summary.steps)
        lines.append(("continue", resume_command(config, folder, max_steps=more)))
    return lines
