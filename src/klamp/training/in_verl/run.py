"""`klamp train --backend verl`: a configuration of klamp, run by verl's own program on a Ray cluster.

Task, prompts and their order, reward, the KL, alarms, the live table and the run's folder are klamp's. Generation, the
loss with klamp's KL in it, the optimizer, evaluation and checkpoints are verl's: klamp starts it, follows its log, and
makes sure of its end.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from torch import nn

from klamp.config.loss import LOSS_TYPES
from klamp.diagnostics.metrics import METRICS
from klamp.diagnostics.names import evaluations, flat, is_verl_line, translate
from klamp.errors import KlampError, MissingLibrary, TrainerFailed, UnsupportedVersion
from klamp.hosts.common.versions import caution_beside, check_version
from klamp.tasks.prompts import check_prompts
from klamp.training import checkpoint
from klamp.training.checkpoint import seal
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.folders import SEAL, lost
from klamp.training.in_verl.data import answered, write_data
from klamp.training.in_verl.overrides import Layout, command
from klamp.training.in_verl.process import Child
from klamp.training.models import (
    check_weights,
    describe_folder,
    ends_with,
    load_tokenizer,
    make_ready,
    model_path,
    shape_of,
)
from klamp.training.observers import Observer, RunInfo, progress_of
from klamp.training.processes import check_alone
from klamp.training.run import Interrupt, Training
from klamp.training.setup import load_prompts
from klamp.training.teachers import check_keys, check_tokens_of

FULL = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed writing")
"""How a line of verl's output says that the disk is full."""
POLL = 0.2
"""Seconds between two looks at the log."""
ENVIRONMENT = "make an environment of its own: python -m venv .venv-verl in a checkout of klamp, then "
ENVIRONMENT += ".venv-verl/bin/pip install '.[train,verl]' 'verl[vllm]', and use its klamp: .venv-verl/bin/klamp"
SCORE_OF = "{skill}/acc/mean@1"
"""verl's name of a skill's score, behind the prefix of an evaluation."""

KL_LOSS, STEP_TIME = "actor/kl_loss", "timing_s/step"
OURS = "kl/k3"
"""Logged by klamp's driver, where there is one, with everything else about the KL."""


class VerlRun(Training):
    """A run whose steps are verl's.

    Args:
        context: of the run; its policy has no weights here.
        observers: told what happens.
    """

    step_zero_kl = 0.01  # the engine and the workers that train are not the same kernels

    def __init__(self, context: Context, observers: Sequence[Observer]) -> None:
        super().__init__(context, observers)
        self.layout = Layout(context.output_dir)
        self.log = LogReader(self.layout.metrics)
        self.child = Child([], self.layout.output)
        self.heard = time.monotonic()
        self.saved = 0

    @staticmethod
    def refuse(config: TrainConfig) -> None:
        """Refuse to start where verl is missing, or another one than was tried; and several processes."""
        check_verl()
        check_alone(config, why="verl starts its processes itself, on the GPUs that gpus and machines ask for")

    @classmethod
    def build(
        cls, config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer], last: ExitStack
    ) -> Self:
        """Load tokenizer and task, and write what verl reads."""
        context = context_of(config, accelerator, folder, observers)
        check_teachers(context)
        write_data(config, context.task, context.tokenizer, Layout(folder))
        return cls(context, observers)

    def cautions(self) -> Iterator[str]:
        """What the user should know before the first step."""
        yield from super().cautions()
        left = [skill for skill in self.context.task.evaluation if skill not in answered(self.context.task)]
        if left:
            yield (
                f"verl does not evaluate {', '.join(left)}: such a skill is read from the policy's log-probabilities, "
                "not answered."
            )

    def begin(self) -> None:
        """Have verl's old log gone, which it writes anew; verl itself evaluates before its first step."""
        self.layout.metrics.unlink(missing_ok=True)

    def resume(self) -> None:
        """Continue from verl's newest checkpoint, with what was measured until then; from the start if there is none.

        Raises:
            RunFolderError: the folder is one of a run that had some, or it is damaged.
        """
        newest = self.layout.newest_step()
        found = [self.layout.checkpoint(newest)] if newest else []
        if checkpoint.last_of(found, self.context.output_dir, begin=checkpoint.OF_VERL) is None:
            return
        # Without a seal klamp was killed before it was there to see it; without a folder verl would begin anew.
        if (found[0] / SEAL).exists() or not found[0].is_dir():
            checkpoint.check(found[0], besides=f", and write the number of another one into {self.layout.newest}")
        self.step = self.saved = newest
        self.recall()

    def take_steps(self, interrupt: Interrupt) -> None:
        """Start verl, from the checkpoint that was found, and stay with it until its last step.

        Raises:
            KeyboardInterrupt, TrainingStopped: interrupted, or stopped by an alarm.
            TrainerFailed: verl ended before its last step, or logged nothing for too long.
        """
        config, steps = self.context.config, self.context.config.run.max_steps
        begun = replace(config.run, resume=self.step > 0)
        begun, shape = replace(config, run=begun), shape_of(config.model.model)
        self.child.words = command(begun, self.context.output_dir, sys.executable, shape)
        self.heard = time.monotonic()
        with self.child:
            self._follow(interrupt)
        if self.step < steps:
            raise self._failed(f"verl ended after step {self.step} of {steps}", got=f"exit code {self.child.code}")

    def _follow(self, interrupt: Interrupt) -> None:
        """Take in what verl logs, until it is over or has to be ended."""
        while True:
            over = self.child.code is not None  # asked first: what it logged last is read below
            for row in self.log.new():
                self.take(row)
            self._tell_checkpoint()
            if over:
                return
            if self.alarms.stopped_by is not None:
                raise self.alarms.stop(self.step, self.context.config.run.max_steps)
            if interrupt.asked and self.layout.newest_step() <= self.step:  # verl logs a step after its checkpoint
                raise KeyboardInterrupt
            self._check_heard()
            time.sleep(POLL)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a row that verl logged: a step, an evaluation, or both."""
        self.heard = time.monotonic()
        step, config = int(row["step"]), self.context.config
        metrics = metrics_of(row, config)
        if metrics:
            if "kl/k3" in metrics and config.optim.num_iterations == 1:
                self._check_step_zero(metrics["kl/k3"])
            self.step, self.metrics = step, metrics
            self.tell(lambda o: o.on_step(step, metrics))
            self._keep_rollouts(step)
        scores = scores_of(row, list(self.context.task.evaluation))
        if scores:
            self.before = self.before or scores
            self.after = scores
            self.tell(lambda o: o.on_evaluation(step, scores))

    def _keep_rollouts(self, step: int) -> None:
        """Delete the completions of the step before, which verl has written by now, unless they are to be kept."""
        before = step - 1
        if before > 1 and before % self.context.config.run.log_completions_every:
            (self.layout.rollouts / f"{before}.jsonl").unlink(missing_ok=True)

    def _tell_checkpoint(self) -> None:
        newest = self.layout.newest_step()
        if newest > self.saved:
            self.saved = newest
            self._seal(self.layout.checkpoint(newest))
            self.tell(lambda o: o.on_checkpoint(newest, self.layout.checkpoint(newest)))

    def _seal(self, folder: Path) -> None:
        """Note the checksums of a checkpoint that verl calls complete; it may delete it meanwhile, for newer ones."""
        try:
            seal(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise lost(self.context.output_dir, error) from error

    def _check_heard(self) -> None:
        limit = self.context.config.run.stall_timeout
        if time.monotonic() - self.heard > limit:
            raise self._failed(
                "verl logged no step for too long, and was ended",
                got=f"nothing for {limit:g} seconds after step {self.step}",
                why="its driver waits for ever where a worker or an engine has died",
            )

    def _failed(self, what: str, *, got: str, why: str = "") -> KlampError:
        shown = self.child.last_lines()
        full = next((line for line in shown.splitlines() if any(words in line for words in FULL)), None)
        if full is not None:
            return lost(self.context.output_dir, OSError(full))
        return TrainerFailed(
            what,
            got=f"{got}; the end of {self.layout.output}:\n{shown}" if shown else got,
            why=why,
            fix="read the log; raise stall_timeout where a step takes longer than that; "
            "--dry_run prints the command to try by hand",
        )

    def kept(self) -> tuple[int, Path | None]:
        """The step to continue from, and its checkpoint."""
        step = self.layout.newest_step()
        return step, self.layout.checkpoint(step) if step else None

    def info(self) -> RunInfo:
        """What is known before the first step; verl does not say how many weights there are."""
        run, adapter = self.context.config.run, self.context.config.model.lora_r > 0
        reference = "the policy with its adapter off, in verl" if adapter else "a frozen copy, in verl"
        address = run.ray_address
        return replace(
            super().info(),
            reference=reference if self.context.config.kl.needs_reference else "none",
            device="a Ray cluster of this machine" if address is None else f"a Ray cluster at {address}",
            processes=run.gpus * run.machines,
        )


def check_verl() -> None:
    """Refuse to start where verl is missing, or another one than was tried.

    Raises:
        MissingLibrary, UnsupportedVersion: with the environment to make.
    """
    try:
        check_version("verl")
        caution_beside("vllm")
    except UnsupportedVersion as error:
        missing = isinstance(error, MissingLibrary)
        raise type(error)(
            "backend='verl' needs verl, which is not installed here" if missing else error.what,
            got=None if missing else error.got,
            why="its pins clash with those of other trainers" if missing else error.why,
            fix=ENVIRONMENT,
        ) from None


def context_of(config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer]) -> Context:
    """The shared parts of a run whose weights are in verl's processes.

    Raises:
        ModelError, DataError, RewardError, UnknownNameError: whatever does not fit, before any work.
    """
    make_ready(config.model.model, progress=progress_of(observers))
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    check_weights(model_path(config.model.model))
    longest, settings = describe_folder(model_path(config.model.model))
    return Context(
        config=config,
        output_dir=folder,
        accelerator=accelerator,
        policy=nn.Module(),
        tokenizer=tokenizer,
        task=load_prompts(config, tokenizer, longest=longest),
        stop=ends_with(settings, tokenizer),
        vocabulary=len(tokenizer),
    )


def check_teachers(context: Context) -> None:
    """Refuse teachers that verl could not load, or whose token ids are others.

    Raises:
        ModelError, DataError: no model, another tokenizer than the policy's, or a prompt whose key names none.
    """
    teacher = context.config.teacher
    if not teacher.there:
        return
    check_keys(context.config, context.task, teacher.models)
    taken = context.config.rollout.max_completion_length + 1  # verl has a teacher write a token more
    for name in teacher.models.values():
        make_ready(name)
        check_weights(model_path(name))
        longest, _ = describe_folder(model_path(name))
        check_prompts(context.task.train, context.tokenizer, longest, taken)
        check_tokens_of(name, context.tokenizer)


class LogReader:
    """The lines of a file that grows, each once and whole.

    Args:
        file: verl's file log; it need not be there yet.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.read = file, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The steps that were logged since the last call, as flat rows; lines of another kind are left out."""
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.read)
                content = opened.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            if is_verl_line(row):
                yield flat(row)


def scores_of(row: Mapping[str, Any], skills: Sequence[str]) -> dict[str, float]:
    """Skill -> its mean score, where a row holds an evaluation."""
    found = evaluations(row)
    named = {skill: SCORE_OF.format(skill=skill) for skill in skills}
    return {skill: found[name] for skill, name in named.items() if name in found}


def metrics_of(row: Mapping[str, Any], config: TrainConfig) -> dict[str, float]:
    """The metrics of a step; none where the row holds an evaluation only.

    verl averages the KL in the loss as it averages the loss. A sum over tokens that is divided by the longest
    completion is put back to a mean over tokens; the mean of sequence means stays as it is.

    Args:
        row: flat, as verl logged it.
        config: of the run.
    """
    found = translate(row)
    if "reward" not in found:
        return {}
    if KL_LOSS in row and OURS not in row:
        found |= _kl_in_loss(found.pop("kl/k3"), found, config)
    if STEP_TIME in row:
        completions = config.rollout.prompts_per_step * config.rollout.num_generations
        found["speed/step_seconds"] = seconds = float(row[STEP_TIME])
        if "length/mean" in found and seconds > 0:
            found["speed/tokens_per_second"] = completions * found["length/mean"] / seconds
    return found | {"policy/updates": float(config.optim.num_iterations)}


def _kl_in_loss(logged: float, found: Mapping[str, float], config: TrainConfig) -> dict[str, float]:
    """The KL in the loss, per token, under the name of its estimator where klamp has one."""
    fixed = LOSS_TYPES[config.loss.loss_type].reduction == "fixed_length"
    factor = config.rollout.max_completion_length / found["length/mean"] if fixed and found.get("length/mean") else 1.0
    name = f"kl/{config.kl.kl_estimator}"
    return {name: logged * factor} if name in METRICS else {}
