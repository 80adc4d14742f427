"""A run that verl's program carries out: klamp starts it, follows its log, and makes sure of its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from klamp.errors import KlampError, TrainerFailed
from klamp.training import checkpoint
from klamp.training.checkpoint import SEAL, seal
from klamp.training.context import Context
from klamp.training.folders import lost
from klamp.training.in_verl.layout import Layout
from klamp.training.in_verl.measurement import LogReader, metrics_of, scores_of
from klamp.training.in_verl.process import Child
from klamp.training.observers import Observer, RunInfo, RunSummary
from klamp.training.run import Interrupt, Run, deferred_interrupts

FULL = ("No space left on device", "Disk quota exceeded", "PytorchStreamWriter failed writing")
"""How a line of verl's output says that the disk is full."""
POLL = 0.2
"""Seconds between two looks at the log."""


class VerlRun(Run):
    """A run whose steps are verl's.

    Args:
        context: of the run; its policy has no weights here.
        observers: told what happens.
        child: verl's program, not yet started.
    """

    step_zero_kl = 0.01  # the engine and the workers that train are not the same kernels

    def __init__(self, context: Context, observers: Sequence[Observer], child: Child) -> None:
        super().__init__(context, observers)
        self.child, self.layout = child, Layout(context.output_dir)
        self.log = LogReader(self.layout.metrics)
        self.after: dict[str, float] = {}
        self.heard = time.monotonic()
        self.saved = 0

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
        self.after = self.recall()

    def run(self) -> RunSummary:
        """Start verl and stay with it until its last step.

        Raises:
            TrainingStopped: interrupted, or stopped by an alarm; verl's newest checkpoint is named.
            TrainerFailed: verl ended before its last step, or logged nothing for too long.
        """
        started = self.heard = time.monotonic()
        try:
            with deferred_interrupts() as interrupt, self.child:
                self._follow(interrupt)
                if self.step < self.context.config.run.max_steps:
                    raise self._failed(
                        f"verl ended after step {self.step} of {self.context.config.run.max_steps}",
                        got=f"exit code {self.child.code}",
                    )
        except KeyboardInterrupt as stop:
            raise self.stopped(*self._kept()) from stop
        except KlampError as error:
            step, folder = self._kept()
            if folder is not None:
                error.add_note(f"  the state after step {step} is saved in {folder}")
            raise
        return self._summary(time.monotonic() - started, self.after)

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
            if interrupt.asked:
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

    def _kept(self) -> tuple[int, Path | None]:
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
