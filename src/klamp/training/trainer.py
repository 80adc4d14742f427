"""The loop: collect a rollout, update the policy on it, measure, adjust beta; evaluate and save now and then."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from klamp.core.controllers import Controller
from klamp.core.types import Reduction
from klamp.diagnostics.statistics import StepRecord, pad_tokens, step_metrics
from klamp.errors import KlampError, TrainingStopped
from klamp.tasks.base import Example
from klamp.training import checkpoint
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.evaluation import evaluate
from klamp.training.observers import Observer, RunInfo, RunSummary
from klamp.training.reference_length import measure_reference_length
from klamp.training.rollouts import Rollout, collect
from klamp.training.runlog import RunLog, plain
from klamp.training.setup import build, choose_folder, make_accelerator, make_optimizer
from klamp.training.updates import UpdateOutput, update, with_old_logprobs

STEP_ZERO_KL = 1e-4
"""KL per token before the first update above which policy and reference are not the same model."""


class Trainer:
    """A run: everything that changes from step to step, and the loop over steps."""

    def __init__(self, context: Context, observers: Sequence[Observer]) -> None:
        self.context = context
        self.observers = list(observers) if context.accelerator.is_main_process else []
        self.optimizer, self.schedule = make_optimizer(context)
        context.wrapped = context.accelerator.prepare_model(context.policy)
        self.controller: Controller = context.config.kl.build_controller()
        self.step = 0
        self.before: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    def tell(self, hook: Callable[[Observer], None]) -> None:
        """Call a hook of every observer; on the main process only."""
        for observer in self.observers:
            hook(observer)

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run's folder.

        Raises:
            RunFolderError: there is none, or it is damaged.
        """
        folder = checkpoint.newest(self.context.output_dir)
        state = checkpoint.load_state(folder)
        checkpoint.load_optimizer(folder, self.optimizer, self.context.device)
        self.schedule.load_state_dict(state["schedule"])
        self.controller.load_state_dict(state["controller"])
        self.context.reference_length = state["reference_length"]
        self.before, self.step = state["before"], state["step"]

    def save(self) -> Path | None:
        """Write a checkpoint of the last step done; on the main process only."""
        context = self.context
        if not context.accelerator.is_main_process:
            return None
        folder = checkpoint.save(
            context.output_dir,
            self.step,
            policy=context.policy,
            tokenizer=context.tokenizer,
            optimizer=self.optimizer,
            state=self._state(),
            keep=context.config.run.keep_checkpoints,
        )
        self.tell(lambda o: o.on_checkpoint(self.step, folder))
        return folder

    def _state(self) -> dict[str, Any]:
        return {
            "controller": self.controller.state_dict(),
            "controller_name": self.context.config.kl.controller_name,
            "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
            "reference_length": self.context.reference_length,
            "before": self.before,
        }

    def prompts(self, step: int) -> list[Example]:
        """The prompts of a step: consecutive slices of a fresh order in every epoch."""
        rows, size = self.context.task.train, self.context.config.rollout.prompts_per_step
        picked: list[Example] = []
        position = step * size
        while len(picked) < size:
            epoch, offset = divmod(position + len(picked), len(rows))
            generator = torch.Generator().manual_seed((self.context.config.run.seed * 7919 + epoch) % 2**63)
            order = torch.randperm(len(rows), generator=generator)[offset:].tolist()
            picked += [rows[i] for i in order[: size - len(picked)]]
        return picked

    def train_step(self) -> dict[str, float]:
        """One rollout and its updates; returns the step's metrics."""
        started = time.perf_counter()
        beta = self.controller.value
        objective = replace(self.context.objective, beta=beta)
        rollout = collect(self.context, self.prompts(self.step), step=self.step, beta=beta)
        outputs: list[UpdateOutput] = []
        rate = self.schedule.get_last_lr()[0]
        for _ in range(self.context.config.optim.num_iterations):
            outputs.append(update(self.context, self.optimizer, rollout, objective))
            rollout = with_old_logprobs(rollout, outputs[0])
        self.schedule.step()
        metrics = self._measure(rollout, outputs) | {"train/learning_rate": float(rate)}
        metrics |= _beta_metrics(objective.kl.normalizer or objective.reduction, beta, metrics, self.context)
        if rollout.ref_logprobs is not None:
            self._check_step_zero(metrics)
            self.controller.update(self._controlled_kl(metrics))
        seconds = time.perf_counter() - started
        metrics |= {"speed/step_seconds": seconds, "speed/tokens_per_second": float(rollout.totals.tokens) / seconds}
        self._show_completions(rollout, outputs[0])
        self.step += 1
        return metrics

    def _measure(self, rollout: Rollout, outputs: list[UpdateOutput]) -> dict[str, float]:
        record = gather_record(self.context, rollout, outputs[0])
        metrics = step_metrics(record, group_size=self.context.config.rollout.num_generations)
        metrics |= outputs[0].losses
        metrics["train/grad_norm"] = sum(o.grad_norm for o in outputs) / len(outputs)
        if "policy/ratio_clipped" in outputs[-1].losses:
            metrics["policy/ratio_clipped"] = outputs[-1].losses["policy/ratio_clipped"]
        return metrics

    def _controlled_kl(self, metrics: dict[str, float]) -> float:
        """What the controller holds: the exact KL where every completion has it, else k3; nats per token."""
        everywhere = self.context.exact_completions >= self.context.config.rollout.num_generations
        return metrics["kl/exact"] if everywhere else metrics["kl/k3"]

    def _check_step_zero(self, metrics: dict[str, float]) -> None:
        if self.step or metrics["kl/k3"] <= STEP_ZERO_KL or self.context.config.model.ref_model:
            return
        text = (
            f"The KL before the first update is {metrics['kl/k3']:.2e} nats per token and should be about 0: policy "
            "and reference differ already. Usual reasons: dropout, an adapter that is not zero at the start, another "
            "data type, or a mask that covers the prompt."
        )
        self.tell(lambda o: o.on_warning(text))

    def _show_completions(self, rollout: Rollout, output: UpdateOutput) -> None:
        run = self.context.config.run
        if not run.log_completions or (self.step and (self.step + 1) % run.log_completions_every):
            return
        rows = [_completion_row(self.context, rollout, output, i) for i in range(len(rollout.texts))]
        self.tell(lambda o: o.on_completions(self.step + 1, rows[: run.log_completions]))

    def evaluate(self) -> dict[str, float]:
        """Evaluate every skill now and tell the observers."""
        scores = evaluate(self.context)
        self.tell(lambda o: o.on_evaluation(self.step, scores))
        return scores

    def run(self) -> RunSummary:
        """Take all steps.

        Raises:
            TrainingStopped: interrupted; the state is saved.
            KlampError: a reward or a loss that cannot be used; the state is saved.
        """
        started = time.perf_counter()
        run = self.context.config.run
        after: dict[str, float] = {}
        if not self.before:
            self.before = after = self.evaluate()
        with _interruptible():
            try:
                while self.step < run.max_steps:
                    self.metrics = self.train_step()
                    self.tell(lambda o: o.on_step(self.step, self.metrics))
                    last = self.step == run.max_steps
                    if last or (run.eval_every and self.step % run.eval_every == 0):
                        after = self.evaluate()
                    if last or (run.save_every and self.step % run.save_every == 0):
                        self.save()
            except KeyboardInterrupt as stop:
                raise self._stopped() from stop
            except KlampError as error:
                folder = self.save()
                if folder is not None:
                    error.add_note(f"  the state after step {self.step} is saved in {folder}")
                raise
        return self._summary(time.perf_counter() - started, after or self.evaluate())

    def _stopped(self) -> TrainingStopped:
        folder = self.save()
        return TrainingStopped(
            f"training was stopped after step {self.step} of {self.context.config.run.max_steps}",
            got="an interrupt",
            why=f"the state is saved in {folder}",
            fix=f"continue with: klamp train --config {self.context.output_dir}/config.yaml "
            f"--output_dir {self.context.output_dir} --resume",
        )

    def _summary(self, seconds: float, after: dict[str, float]) -> RunSummary:
        summary = RunSummary(
            output_dir=self.context.output_dir,
            steps=self.step,
            seconds=seconds,
            rl_skill=self.context.task.rl_skill,
            before=self.before,
            after=after,
            final_metrics=self.metrics,
        )
        self.tell(lambda o: o.on_end(summary))
        return summary

    def info(self) -> RunInfo:
        """What is known before the first step."""
        context = self.context
        sizes = [(p.numel(), p.requires_grad) for p in context.policy.parameters()]
        return RunInfo(
            config=context.config,
            output_dir=context.output_dir,
            start_step=self.step,
            parameters=sum(n for n, _ in sizes),
            trainable_parameters=sum(n for n, trained in sizes if trained),
            reference="none" if context.reference is None else context.reference.describe(),
            device=str(context.device),
            processes=context.processes,
        )


def gather_record(context: Context, rollout: Rollout, output: UpdateOutput) -> StepRecord:
    """The tokens of the step from all processes, on every process."""
    length = context.config.rollout.max_completion_length

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else context.gather(pad_tokens(x, length) if x.ndim == 2 else x)

    def certain(x: Tensor) -> Tensor:
        return context.gather(pad_tokens(x, length) if x.ndim == 2 else x)

    return StepRecord(
        mask=certain(rollout.mask),
        kl_mask=certain(rollout.kl_mask),
        policy=certain(output.policy_logprobs),
        sampler=certain(rollout.completions.sampler_logprobs),
        entropy=certain(output.entropy),
        rewards=certain(rollout.rewards),
        ended=certain(rollout.completions.ended),
        lengths=certain(rollout.completions.mask.sum(-1)),
        ref=whole(rollout.ref_logprobs),
        exact=whole(output.exact),
        exact_forward=whole(output.exact_forward),
        exact_rows=whole(rollout.exact_rows),
    )


def _beta_metrics(reduction: Reduction, beta: float, metrics: dict[str, float], context: Context) -> dict[str, float]:
    """beta in force, also as the coefficient of a whole completion's KL."""
    in_loss = context.objective.kl.placement == "loss"
    divisor = {
        "token_mean": metrics["length/mean"],
        "sequence_mean": metrics["length/mean"],
        "sequence_sum": 1.0,
        "fixed_length": float(context.config.rollout.max_completion_length),
    }[reduction]
    found = {"beta": beta, "beta/per_sequence": beta / divisor if in_loss else beta}
    if "kl/k1_sequence" in metrics:
        found["reward/penalized"] = metrics["reward"] - found["beta/per_sequence"] * metrics["kl/k1_sequence"]
    return found


def _completion_row(context: Context, rollout: Rollout, output: UpdateOutput, i: int) -> dict[str, object]:
    mask = rollout.completions.mask[i]
    ids = rollout.completions.ids[i][mask].tolist()
    row: dict[str, object] = {
        "prompt": rollout.examples[i].prompt,
        "completion": rollout.texts[i],
        "answer": rollout.examples[i].answer,
        "reward": float(rollout.rewards[i]),
        "advantage": float(rollout.advantages[i]),
        "tokens": context.tokenizer.convert_ids_to_tokens(ids),
        "policy_logprobs": output.policy_logprobs[i][mask].tolist(),
        "sampler_logprobs": rollout.completions.sampler_logprobs[i][mask].tolist(),
    }
    if rollout.ref_logprobs is not None:
        row["ref_logprobs"] = rollout.ref_logprobs[i][mask].tolist()
    return row


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does: with its state saved."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def train_run(config: TrainConfig, observers: Sequence[Observer] = ()) -> RunSummary:
    """Run a configuration from its first step (or its newest checkpoint) to its last.

    Args:
        config: what to run.
        observers: told what happens; the run's folder and trackers are served besides.

    Raises:
        KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
    """
    folder = choose_folder(config)
    accelerator = make_accelerator(config, folder)
    try:
        context = build(config, accelerator, folder, observers)
        trainer = Trainer(context, [RunLog(accelerator), *observers])
        if config.run.resume:
            trainer.resume()
        trainer.tell(lambda o: o.on_start(trainer.info()))
        _begin_trackers(accelerator, config, folder)
        if trainer.step == 0:
            measure_reference_length(context)
        return trainer.run()
    finally:
        for observer in observers if accelerator.is_main_process else ():
            observer.close()
        accelerator.end_training()


def _begin_trackers(accelerator: Any, config: TrainConfig, folder: Path) -> None:
    if not config.run.report_to:
        return
    values = {k: str(v) if v is None or isinstance(v, list) else v for k, v in plain(config).items()}
    # Trackers write into the run's folder; wandb is told so because it would take the working directory.
    accelerator.init_trackers("tracking", config=values, init_kwargs={"wandb": {"dir": str(folder)}})
