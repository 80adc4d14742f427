"""`klamp train --backend verl`: a configuration of klamp, run by verl's own program on a Ray cluster.

Task, prompts and their order, reward, the KL, alarms, the live table and the run's folder are klamp's. Generation, the
loss with klamp's KL in it, the optimizer, evaluation and checkpoints are verl's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from klamp.config import build_objective
from klamp.errors import MissingLibrary, UnsupportedVersion
from klamp.hosts.common.exclusions import excluded_ids
from klamp.hosts.common.versions import check_version
from klamp.tasks.prompts import chat_cautions
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.in_verl.data import answered, write_data
from klamp.training.in_verl.layout import Layout
from klamp.training.in_verl.overrides import command, model_path
from klamp.training.in_verl.process import Child
from klamp.training.in_verl.run import VerlRun
from klamp.training.models import describe_folder, ends_with, load_tokenizer, make_ready
from klamp.training.observers import Observer, RunSummary, progress_of
from klamp.training.processes import check_alone
from klamp.training.runlog import RunLog, begin_trackers
from klamp.training.setup import load_prompts, make_accelerator, opened_folder

ENVIRONMENT = "make an environment of its own: ENGINE= scripts/environment.sh verl in a checkout of klamp, then the "
ENVIRONMENT += "vLLM of your GPUs into it, and use its klamp: .venv-verl/bin/klamp"


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Run a configuration with backend `verl` to its last step, from verl's newest checkpoint if it is to be resumed.

    Args:
        config: what to run.
        observers: told what happens; the run's folder and trackers are served besides.

    Raises:
        UnsupportedVersion: verl is missing, or outside the range that was tried; before any work.
        KlampError: bad input before any work, or a run that ended early; see `klamp.errors`.
    """
    check_verl()
    check_alone(config, why="verl starts its processes itself, on the GPUs that gpus and machines ask for")
    with opened_folder(config) as folder:
        accelerator = make_accelerator(config, folder)
        try:
            context, layout = context_of(config, folder, accelerator, observers), Layout(folder)
            begun = replace(config.run, resume=config.run.resume and layout.newest_step() > 0)
            child = Child(command(replace(config, run=begun), folder, sys.executable), layout.output)
            run = VerlRun(context, [RunLog(accelerator), *observers], child)
            if config.run.resume:
                run.resume()
            write_data(config, context.task, context.tokenizer, layout)
            layout.metrics.unlink(missing_ok=True)  # verl writes it anew
            run.tell(lambda o: o.on_start(run.info()))
            run.warn(*cautions(context))
            begin_trackers(accelerator, config, folder, done=run.step)
            return run.run()
        finally:
            for observer in observers:
                observer.close()
            accelerator.end_training()


def prepare(config: TrainConfig, observers: Sequence[Observer] = ()) -> Path:
    """Write what verl's command reads, for a run that is started by hand; the folder.

    Args:
        config: of the run.
        observers: told of slow work.

    Raises:
        KlampError: bad input.
    """
    with opened_folder(config) as folder:
        accelerator = make_accelerator(config, folder)
        context = context_of(config, folder, accelerator, observers)
        write_data(config, context.task, context.tokenizer, Layout(folder))
        return folder


def check_verl() -> None:
    """Refuse to start where verl is missing, or another one than was tried.

    Raises:
        MissingLibrary, UnsupportedVersion: with the environment to make.
    """
    try:
        check_version("verl")
    except UnsupportedVersion as error:
        missing = isinstance(error, MissingLibrary)
        raise type(error)(
            "backend='verl' needs verl, which is not installed here" if missing else error.what,
            got=None if missing else error.got,
            why="its pins clash with those of other trainers" if missing else error.why,
            fix=ENVIRONMENT,
        ) from None


def context_of(config: TrainConfig, folder: Path, accelerator: Accelerator, observers: Sequence[Observer]) -> Context:
    """The shared parts of a run whose weights are in verl's processes.

    Raises:
        ModelError, DataError, RewardError, UnknownNameError: whatever does not fit, before any work.
    """
    make_ready(config.model.model, progress=progress_of(observers))
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    longest, settings = describe_folder(model_path(config))
    task = load_prompts(config, tokenizer, longest=longest)
    weightless = nn.Module()
    return Context(
        config=config,
        output_dir=folder,
        accelerator=accelerator,
        policy=weightless,
        wrapped=weightless,
        reference=None,
        original=None,
        excluded=excluded_ids(config.kl.kl_exclude_tokens, tokenizer),
        tokenizer=tokenizer,
        task=task,
        objective=build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length),
        stop=ends_with(settings, tokenizer),
        vocabulary=len(tokenizer),
    )


def cautions(context: Context) -> Iterator[str]:
    """What the user should know before the first step."""
    yield from chat_cautions(context.config.task, context.tokenizer, context.stop)
    left = [skill for skill in context.task.evaluation if skill not in answered(context.task)]
    if left:
        yield (
            f"verl does not evaluate {', '.join(left)}: such a skill is read from the policy's log-probabilities, not "
            "answered."
        )
