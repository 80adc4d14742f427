"""The loop: collect a rollout, update the policy on it, measure, adjust beta; evaluate and save now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from torch import nn

from klamp.config.teacher import OF_THE_POLICY
from klamp.core.objective import Objective, Weighted
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
from klamp.training.teachers import check_same_teacher
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
        self.fingerprint: dict[str, list[float]] = {}
        if context.teachers is not None:
            temperature = context.config.rollout.temperature
            self.fingerprint = context.teachers.fingerprint(context.task.train, context.device, temperature=temperature)

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
        checkpoint.load_anchors(folder, self._moving())

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
        check_same_teacher(dict(state.get("teacher") or {}), self.fingerprint)
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
            anchors=self._moving(),
            state=self._state(),
            keep=context.config.run.keep_checkpoints,
        )

    def _moving(self) -> dict[str, nn.Module]:
        """The weights of a reference and a teacher that move, which are nowhere else."""
        given = {"reference": self.context.reference, "teacher": self.context.teachers}
        found = {name: None if anchor is None else anchor.weights() for name, anchor in given.items()}
        return {name: weights for name, weights in found.items() if weights is not None}

    def _state(self) -> dict[str, Any]:
        return {
            **self.control.state_dict(),
            **({"teacher": self.fingerprint} if self.fingerprint else {}),
            "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
        }

    def train_step(self) -> dict[str, float]:
        """One rollout and its updates; returns the step's metrics."""
        started = time.perf_counter()
        beta = self.control.beta(self.step, self.context.config.run.max_steps)
        others = self._others()
        objective = replace(self.context.objective, beta=beta, others=others)
        rollout = self.collect(beta, others)
        outputs: list[UpdateOutput] = []
        rate = float(self.schedule.get_last_lr()[0])
        for _ in range(self.context.config.optim.num_iterations):
            outputs.append(self.update(rollout, objective))
            if outputs[-1].stopped:
                break
            rollout = with_old_logprobs(rollout, outputs[0])
        self.schedule.step()
        metrics = measured(self.context, rollout, outputs) | {"train/learning_rate": rate}
        metrics |= control_metrics(self.context, beta, metrics)
        if others:
            metrics["teacher/coef"] = others[0].coefficient
            self._check_teacher(metrics["teacher/kl"])
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
        if self.context.teachers is not None:
            self.context.teachers.after_step(self.context.policy, self.step)
        self.whole = True
        return metrics

    def _check_teacher(self, kl: float) -> None:
        """Warn where the policy is its own teacher, at the same prompts, and the first KL to it is not 0."""
        config, teacher = self.context.config, self.context.config.teacher
        itself = teacher.kind in OF_THE_POLICY or teacher.teacher_model == config.model.model
        if self.step or teacher.teacher_prompt or not itself or abs(kl) <= self.step_zero_kl:
            return
        self.warn(
            f"The KL to the teacher before the first update is {kl:.2e} nats per token and should be about 0: it is "
            "the same model at the same prompts. Its numbers likely belong to other tokens, or to another temperature."
        )

    def _others(self) -> tuple[Weighted, ...]:
        """The KL to the teacher with its coefficient in this step."""
        teacher, steps = self.context.config.teacher, self.context.config.run.max_steps
        coefficient = teacher.coefficient(self.step, steps)
        return tuple(Weighted(coefficient, term) for _, term in self.context.objective.others)

    def collect(self, beta: float, others: Sequence[Weighted]) -> Rollout:
        """Sample and rate the completions of this step."""
        return collect(self.context, self.prompts(self.step), step=self.step, beta=beta, others=others)

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
