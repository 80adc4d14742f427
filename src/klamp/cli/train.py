"""`klamp train`: parse, show, run, sum up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from klamp.cli.arguments import TrainRequest, parse_train
from klamp.cli.describe import resume_command
from klamp.cli.errors import is_main_process
from klamp.errors import ConfigError, TrainingStopped
from klamp.training.config import TrainConfig
from klamp.training.folders import checkpoint_folders
from klamp.training.observers import RunInfo
from klamp.training.runners import Runner, trainer_of
from klamp.training.sections import Backend


def run(argv: Sequence[str], *, console: Console | None = None, runner: Runner | None = None) -> int:
    """Run `klamp train` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `train`.
        console: where the run is shown; None: stdout.
        runner: what trains; None: `train_run` of `klamp.training.trainer`, or of the backend that is asked for.

    Raises:
        KlampError: whatever stops the run; the caller shows it.
    """
    request = parse_train(argv)
    console = console or Console(highlight=False)
    if request.options.dry_run:
        from klamp.cli.dry_run import plan_text
        from klamp.training.inputs import open_inputs

        text = plan_text(request, open_inputs(request.config))
        if is_main_process():
            console.out(text, highlight=False)
        return 0
    if request.options.all:
        raise ConfigError(
            "--all belongs to --dry_run", got="--all", why="nothing else prints the configuration", fix="leave it out"
        )
    if request.options.prepare:
        _prepare(request, console)
        return 0
    _train(request, console, runner)
    return 0


def _prepare(request: TrainRequest, console: Console) -> None:
    """Write the data of a run that is started by hand.

    Raises:
        ConfigError: a backend that is not started so.
    """
    backend = request.config.run.backend
    if backend != "verl":
        raise ConfigError(
            "--prepare has nothing to write",
            got=f"backend={backend!r}",
            why="verl is the one backend that reads its data from files of klamp's",
            fix="leave --prepare out, or set --backend verl",
        )
    from klamp.training.in_verl.train import prepare

    console.out(f"written: {prepare(request.config)}/verl", highlight=False)


def _train(request: TrainRequest, console: Console, runner: Runner | None) -> None:
    from klamp.cli.live import LiveTable
    from klamp.cli.log_lines import LogLines
    from klamp.cli.summary import print_summary

    display = LiveTable(console) if console.is_terminal and not console.is_dumb_terminal else LogLines(console)
    try:
        summary = (runner or _trainer(console, request.config.run.backend))(request.config, [display])
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
        print_summary(console, request.config, summary)


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


def _trainer(console: Console, backend: Backend) -> Runner:
    """The function that trains with a backend; says on a terminal that libraries are loading, which takes seconds."""
    waiting = console.status("loading libraries") if console.is_terminal and is_main_process() else nullcontext()
    with waiting:
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils import logging

        trains = trainer_of(backend)
        logging.disable_progress_bar()  # a bar per checkpoint would tear the display apart
        enable_progress_bars()  # downloads keep theirs: they come before it
    return trains
