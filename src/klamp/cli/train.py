"""`klamp train`: parse, show, run, sum up: what it gained and kept, how far it went, where its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from klamp.cli.arguments import parse_train
from klamp.cli.describe import MONITOR, plan_text, resume_command, tool
from klamp.cli.display import Display, skill_rows
from klamp.cli.prepare import prepared_text
from klamp.cli.text import MISSING, duration, fixed, say, show_table
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

        say(plan_text(request.config, open_inputs(request.config), argv))
    elif request.config.run.backend != "local":
        from klamp.training.launch import launch

        launch(request.config, argv)
    else:
        _train(request.config, console or Console(highlight=False), runner)
    return 0


def _train(config: TrainConfig, console: Console, runner: Runner | None) -> None:
    display = Display(console)
    try:
        summary = (runner or _trainer(console))(config, [display])
    except TrainingStopped as stopped:
        if display.info is not None and stopped.resumable:
            left = tuple(name for name in config.run.stop_on if name not in display.raised)
            stopped.fix = f"continue with: {resume_command(config, display.info.output_dir, stop_on=left)}"
        raise
    except KeyboardInterrupt as stop:
        raise _stopped(config, display.info) or stop from stop
    finally:
        display.close()
    print_summary(config, summary)


def _stopped(config: TrainConfig, info: RunInfo | None) -> TrainingStopped | None:
    """The error of an interrupt before the first step of a process, or after its last; None: nothing is saved."""
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
    """What trains, once its libraries are loaded, which takes seconds; a terminal shows a text meanwhile."""
    with console.status("loading libraries") if console.is_terminal else nullcontext():
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils import logging

        import klamp.training.trainer  # noqa: F401

        logging.disable_progress_bar()  # a bar per checkpoint would tear the display apart
        enable_progress_bars()  # downloads keep theirs: they come before it
    return train_run


ESTIMATORS = ("k1", "k3", "exact")
ROWS = {"": "nats per token", "_sequence": "nats per completion", "_original": "from its start, per token"}


def print_summary(config: TrainConfig, summary: RunSummary) -> None:
    """Print the summary of a finished run: scores before and after, KL and beta, files."""
    metrics, kl = summary.final_metrics, config.kl
    done = f"{summary.steps} steps" if summary.steps else "no step was taken (--max_steps 0); the model was evaluated,"
    say(f"\ndone: {done} in {duration(summary.seconds)}\n")
    headings = ("", "before", "after", "change")
    show_table("skill (held out)", headings, skill_rows(summary.before, summary.after, summary.rl_skill))
    say()
    if kl.reference == "sampler" and kl.beta > 0 and summary.steps:
        moved = metrics.get("policy/kl_old", 0.0)
        say(f"KL from the sampler (last update): {moved:.4f} nats per token; beta: {describe_controller(kl)}")
    elif kl.needs_reference and summary.steps:
        show_table("KL from the reference (last step)", ("", *ESTIMATORS), _kl_rows(metrics))
        say(_beta_text(config, metrics))
    else:
        why = "no step was taken" if kl.needs_reference else f"beta is 0, so no reference was loaded{MONITOR}"
        say(f"KL from the reference: not measured; {why}")
    if "teacher/kl" in metrics:
        end = f"; it gives the policy's ends a probability of {metrics['teacher/end']:.3f}" * ("teacher/end" in metrics)
        say(f"KL to the teacher (last step): {metrics['teacher/kl']:.4f} nats per token{end}")
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
    kl, size = config.kl, config.rollout.num_generations
    beta = metrics.get("beta", kl.beta)
    if "length/mean" not in metrics or config.task.reward == NO_REWARD:
        return f"beta: {beta:.3g} ({'fixed' if kl.controller_name == 'fixed' else describe_controller(kl)})"
    lengths = {"mean_length": metrics["length/mean"], "max_length": config.rollout.max_completion_length}
    price = configured_price(kl, config.loss, group_size=size, beta=beta, **lengths)
    return f"beta: {describe_controller(kl)}; price: {describe_price(price, group_size=size)}"


def _files(config: TrainConfig, summary: RunSummary) -> list[tuple[str, str]]:
    """The paths of the run's files; only files that exist are named."""
    folder = summary.output_dir
    files = {"metrics": folder / "metrics.jsonl", "completions": folder / "completions.jsonl"}
    lines = [("run", f"{folder}"), *((name, str(file)) for name, file in files.items() if file.exists())]
    saved = checkpoint_folders(folder)
    if saved:
        lines.append(("checkpoints", f"{saved[-1].parent}: {', '.join(path.name for path in saved)}"))
    if "tensorboard" in config.run.report_to:
        lines.append(("TensorBoard", f"{tool('tensorboard')} --logdir {folder}"))
    lines.append(("look at it", f"{tool('klamp')} report {folder}"))
    if saved:
        lines.append(("continue", resume_command(config, folder, max_steps=max(1, 2 * summary.steps))))
    return lines
