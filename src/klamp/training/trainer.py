"""The loop: collect a rollout, update the policy on it, measure, adjust beta; evaluate and save now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator

from klamp.core.objective import Objective
from klamp.errors import RunFolderError
from klamp.hosts.common.control import held_kl
from klamp.training import checkpoint
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.folders import number_of
from klamp.training.observers import Observer
from klamp.training.optimizer import adamw, go_on, schedule_of
from klamp.training.processes import check_one_machine
from klamp.training.rollouts import Rollout, collect, measure_reference_length
from klamp.training.run import Interrupt, Training
from klamp.training.setup import build
from klamp.training.updates import UpdateOutput, control_metrics, measured, speed, update, with_old_logprobs


class Trainer(Training):
    """klamp's own loop over the steps of a run, and everything that changes from step to step."""

    def __init__(self, context: Context, observers: Sequence[Observer]) -> None:
        super().__init__(context, observers)
        context.wrapped = context.accelerator.prepare_model(context.wrapped)
        self.optimizer = adamw(context.policy, context.config)
        self.schedule = schedule_of(self.optimizer, context.config)
        self.whole = True
        self.optimizer.register_step_pre_hook(self._between_steps)
        self.control = context.control
        self.saved: tuple[int, Path | None] = (0, None)

    @staticmethod
    def refuse(config: TrainConfig) -> None:
        """Refuse several machines, and weights that are divided among processes."""
        check_one_machine()

    @classmethod
    def build(
        cls, config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer], last: ExitStack
    ) -> Self:
        """Load policy, reference and task into this process."""
        return cls(build(config, accelerator, folder, observers), observers)

    def begin(self) -> None:
        """Measure the reference's length where a clip needs it and it is not known yet; evaluate."""
        self.measure_length()
        super().begin()

    def measure_length(self) -> None:
        """Measure and set the run's reference length, where a clip needs one that nobody gives."""
        measure_reference_length(self.context)

    def _between_steps(self, *_: object) -> None:
        """From the first update of a step to its end, the weights belong to no step that could be resumed."""
        self.whole = False

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run's folder; from the first step where there is none yet.

        Raises:
            RunFolderError: it is damaged.
        """
        folder = checkpoint.newest(self.context.output_dir)
        if folder is None:
            return
        checkpoint.load_optimizer(folder, self.optimizer)
        self.load(folder)
        if self.context.reference is not None:
            checkpoint.load_reference(folder, self.context.reference.weights())

    def load(self, folder: Path) -> None:
        """Go on from the plain state of a checkpoint: all but weights, moments and reference.

        Raises:
            RunFolderError: it is damaged.
        """
        state = checkpoint.load_state(folder)
        try:
            saved = {name: x for name, x in state["schedule"].items() if name in (*self.schedule.state_dict(), "rise")}
            self.schedule.load_state_dict({**saved, "lr_lambdas": [None]})  # the function is not saved
            if repr(self.schedule.last_epoch) != repr(state["step"]):
                raise TypeError(f"last_epoch of the schedule is {self.schedule.last_epoch!r}")
            self.noted += filter(None, [go_on(self.schedule, self.context.config)])
            self.step = state["step"]
            self.control.load_state_dict(state)
        except checkpoint.UNREADABLE as error:
            raise checkpoint.damaged(folder, error) from error
        self.saved = (self.step, folder)
        self.recall()

    def save(self) -> Path | None:
        """Write a checkpoint of the last step done: the main process does.

        A step that this run has saved before is not written again.
        """
        if self.saved[0] != self.step:
            folder = self.write() if self.context.accelerator.is_main_process else None
            self.saved = (self.step, folder)
            if folder is not None:
                self.tell(lambda o: o.on_checkpoint(self.step, folder))
        return self.saved[1]

    def write(self) -> Path:
        """Write weights, moments and the state of the last step into the run's folder; the checkpoint."""
        context = self.context
        return checkpoint.save(
            context.output_dir,
            self.step,
            policy=context.policy,
            tokenizer=context.tokenizer,
            optimizer=self.optimizer,
            reference=None if context.reference is None else context.reference.weights(),
            state=self._state(),
            keep=context.config.run.keep_checkpoints,
        )

    def _state(self) -> dict[str, Any]:
        return {
            **self.control.state_dict(),
            "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
        }

    def train_step(self) -> dict[str, float]:
        """One rollout and its updates; returns the step's metrics."""
        started = time.perf_counter()
        beta = self.control.beta(self.step, self.context.config.run.max_steps)
        objective = replace(self.context.objective, beta=beta)
        rollout = self.collect(beta)
        outputs: list[UpdateOutput] = []
        rate = float(self.schedule.get_last_lr()[0]) * self.control.next_rate_factor()  # lowered above the guard
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(self.context.config.optim.num_iterations):
            outputs.append(self.update(rollout, objective))
            if outputs[-1].stopped:
                break
            rollout = with_old_logprobs(rollout, outputs[0])
        self.schedule.step()
        metrics = measured(self.context, rollout, outputs) | {"train/learning_rate": rate}
        metrics |= control_metrics(self.context, beta, metrics)
        kl = held_kl(metrics, exact_everywhere=self.context.exact_everywhere)
        if kl is not None:
            self._check_step_zero(metrics["kl/k3"])
            rewards = self.context.gather(rollout.rewards)
            self.control.update(kl, metrics, rewards.view(-1, self.context.config.rollout.num_generations))
        metrics |= speed(float(rollout.totals.tokens), time.perf_counter() - started)
        self._show_completions(rollout, outputs[0])
        self.step += 1
        if self.context.reference is not None:
            self.context.reference.after_step(self.context.policy, self.step)
        self.whole = True
        return metrics

    def collect(self, beta: float) -> Rollout:
        """Sample and rate the completions of this step."""
        return collect(self.context, self.prompts(self.step), step=self.step, beta=beta)

    def update(self, rollout: Rollout, objective: Objective) -> UpdateOutput:
        """One optimizer step on them."""
        return update(self.context, self.optimizer, rollout, objective)

    def take_steps(self, interrupt: Interrupt) -> None:
        """Take all steps that are left.

        Raises:
            KeyboardInterrupt, TrainingStopped: it was interrupted, or an alarm of stop_on ends it.
        """
        while self.step < self.context.config.run.max_steps:
            ended = self.end_step(self.train_step(), interrupt)
            if ended is not None:
                raise ended

    def kept(self) -> tuple[int, Path | None]:
        """The step to continue from and its folder: the last one done, or in mid-update the newest on disk."""
        main = self.context.accelerator.is_main_process
        if self.whole and main and self.context.output_dir.is_dir():
            with suppress(KeyboardInterrupt, RunFolderError):  # impatience, a full disk: what is there is there
                return self.step, self.save()
        found = checkpoint.checkpoints(self.context.output_dir)
        return (number_of(found[-1]), found[-1]) if found else (0, None)
