"""A run that TRL's loop carries out: what klamp's own loop does after each step is done when TRL has logged one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.models import unwrap_model_for_generation

from klamp.diagnostics.names import translate
from klamp.errors import KlampError, TrainingStopped
from klamp.training import checkpoint
from klamp.training.context import Context
from klamp.training.evaluation import Evaluation, evaluate
from klamp.training.folders import number_of
from klamp.training.in_trl.measurement import rollout_of, update_of
from klamp.training.in_trl.split import gathered
from klamp.training.in_trl.trainer import RunTrainer
from klamp.training.models import former_names
from klamp.training.observers import Observer, RunInfo, RunSummary
from klamp.training.processes import explained
from klamp.training.run import Interrupt, Run, deferred_interrupts
from klamp.training.updates import UpdateOutput, control_metrics, measured, not_finite, speed


class TRLRun(Run):
    """A run whose steps are TRL's.

    Args:
        context: of the run; its policy and control become those of the trainer.
        observers: told what happens.
        trainer: built and not yet started.
    """

    def __init__(self, context: Context, observers: Sequence[Observer], trainer: RunTrainer) -> None:
        context.policy = trainer.accelerator.unwrap_model(trainer.model)
        context.control = trainer._klamp.control or context.control
        super().__init__(context, observers)
        self.trainer, self.updates = trainer, context.config.optim.num_iterations
        self.outputs: list[UpdateOutput] = []
        self.first: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.interrupt = Interrupt()
        self.ends: Callable[[], TrainingStopped] | None = None
        self.started = time.perf_counter()
        self.checkpoint: Path | None = None
        trainer.add_callback(AfterStep(self))

    def examine(self) -> Evaluation:
        """Every skill's score now, and some answers."""
        accelerator, plugin = self.trainer.accelerator, getattr(self.trainer.accelerator.state, "fsdp_plugin", None)
        wrapped: Any = self.trainer.model_wrapped
        self.context.policy = policy = accelerator.unwrap_model(wrapped)
        with (
            gathered(policy, split_after_passes=plugin is not None and bool(plugin.reshard_after_forward)),
            unwrap_model_for_generation(wrapped, accelerator),  # under ZeRO-3 every process gets all weights
        ):
            return evaluate(self.context)

    def reference_model(self) -> nn.Module | None:
        """TRL's reference model; None with an adapter, or without a KL."""
        model: Any = self.trainer.ref_model
        return None if model is None else self.trainer.accelerator.unwrap_model(model)

    def resume(self) -> None:
        """Continue from TRL's newest checkpoint in the run's folder; from the first step where there is none yet."""
        self.checkpoint = checkpoint.newest(self.context.output_dir, begin=checkpoint.OF_TRL)
        if self.checkpoint is None:
            return
        self.step = number_of(self.checkpoint) // self.updates
        self.after = self.recall()

    def run(self) -> RunSummary:
        """Take all steps.

        Raises:
            TrainingStopped: interrupted; the state is saved.
            KlampError: a reward or a loss that cannot be used; the newest checkpoint is named.
        """
        started = time.perf_counter()
        if not self.before:
            self.before = self.after = self.evaluate()
        try:
            with deferred_interrupts() as self.interrupt, former_names(), explained(self.context.config):
                if self.step < self.context.config.run.max_steps:
                    self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
        except KeyboardInterrupt as stop:
            raise self.stopped(*self._kept()) from stop
        except KlampError as error:
            step, folder = self._kept()
            if folder is not None:
                error.add_note(f"  the state after step {step} is saved in {folder}")
            raise
        if self.ends is not None:
            raise self.ends()
        return self._summary(time.perf_counter() - started, self.after)

    def after_update(self, logs: Mapping[str, Any], control: TrainerControl) -> None:
        """Take in an update that TRL has logged; after the last of a step, do what a step ends with."""
        generated = self.trainer.generated
        assert generated is not None
        found = translate(logs)
        rollout = rollout_of(self.context, generated)
        if not self.outputs:
            self.first = found
        beta = self.first.get("beta", 0.0)
        seen = generated.seen(len(self.outputs))
        loss, grad_norm = found["train/loss"], found.get("train/grad_norm", 0.0)
        if not math.isfinite(grad_norm):  # the weights are gone; no checkpoint is to hold them
            raise not_finite("the gradient is not finite", f"loss {loss}, gradient norm {grad_norm}")
        self.outputs.append(update_of(self.context, rollout, seen, beta=beta, loss=loss, grad_norm=grad_norm))
        if len(self.outputs) < self.updates:
            return
        self.warn(*self.trainer.cautions)
        self.trainer.cautions.clear()
        metrics = self.first | measured(self.context, rollout, self.outputs)
        metrics["train/learning_rate"] = self.first["train/learning_rate"] * self.first.get("kl/lr_factor", 1.0)
        metrics |= control_metrics(self.context, beta, metrics)
        if "kl/k3" in metrics:
            self._check_step_zero(metrics["kl/k3"])
        metrics |= speed(float(rollout.totals.tokens), time.perf_counter() - self.started)
        self._show_completions(rollout, self.outputs[0])
        self.outputs = []
        self._end_step(metrics, control)

    def _end_step(self, metrics: dict[str, float], control: TrainerControl) -> None:
        run = self.context.config.run
        self.step, self.metrics = self.step + 1, metrics
        self.tell(lambda o: o.on_step(self.step, metrics))
        if self.is_due(run.eval_every):
            self.after = self.evaluate()
        control.should_save = self.is_due(run.save_every)
        if self.step == run.max_steps:
            return
        if run.stop_on and self._anywhere(self.alarms.stopped_by is not None):
            self.ends = lambda: self.alarms.stop(self.step, run.max_steps)
        elif self._anywhere(self.interrupt.asked):
            self.ends = lambda: self.stopped(*self._kept())
        if self.ends is not None:
            control.should_save = control.should_training_stop = True

    def _kept(self) -> tuple[int, Path | None]:
        """The step to continue from, and its checkpoint."""
        found = checkpoint.checkpoints(self.context.output_dir, begin=checkpoint.OF_TRL)
        return (number_of(found[-1]) // self.updates, found[-1]) if found else (0, None)

    def info(self) -> RunInfo:
        """What is known of the run before its first step."""
        found = super().info()
        return RunInfo(**{**vars(found), "reference": self.trainer._klamp.reference or "none"})


class AfterStep(TrainerCallback):
    """Hands what TRL logs and saves to a run."""

    def __init__(self, run: TRLRun) -> None:
        self.run = run

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock of a step; TRL generates within the first of its updates."""
        if not self.run.outputs:
            self.run.started = time.perf_counter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take in an update; the last row of a run, which sums it up, is none."""
        if logs and "train_runtime" not in logs:
            self.run.after_update(logs, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell of the checkpoint."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        self.run.tell(lambda o: o.on_checkpoint(self.run.step, folder))
