"""The loop of `klamp train`, from top to bottom.

take_step   one step: sample, score, update, measure, adjust beta
Trainer     the loop of a configuration: schedule, evaluation, checkpoints, alarms, resume
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from klamp.config.teacher import OF_THE_POLICY
from klamp.core.objective import Weighted
from klamp.errors import KlampError, RunFolderError, TrainingStopped
from klamp.hosts.common.control import go_on_from, held_kl
from klamp.hosts.common.step_zero import STEP_ZERO_KL, likely_reasons, step_zero_text
from klamp.lab import checkpoint
from klamp.lab.anchors import FrozenReference
from klamp.lab.config import TrainConfig
from klamp.lab.evaluation import check_same, evaluate, fingerprints, teacher_answers
from klamp.lab.folders import checkpoints, lines_until, number_of, opened_folder, scores_of
from klamp.lab.interrupts import Interrupt, deferred_interrupts
from klamp.lab.observers import AlarmObserver, Observer, RunInfo, RunLog, RunSummary, check_trackers
from klamp.lab.resumed import check_resume, identity
from klamp.lab.rollouts import Rollout, collect, measure_reference_length
from klamp.lab.sampling import examples_of_step
from klamp.lab.setup import Context, build, check_processes
from klamp.lab.tasks.base import Example
from klamp.lab.tasks.prompts import chat_cautions
from klamp.lab.updates import (
    UpdateOutput,
    adamw,
    completion_row,
    control_metrics,
    measured,
    schedule_of,
    update,
    with_old_logprobs,
)
from klamp.names import IDENTITY, METRICS_FILE


class Step(NamedTuple):
    """What one step of GRPO gave."""

    rollout: Rollout  # the completions that were trained on
    first: UpdateOutput  # what its first update measured
    metrics: dict[str, float]  # name -> value, names as in `klamp.doctor.metrics`


def take_step(
    context: Context, optimizer: Optimizer, examples: Sequence[Example], *, step: int, total_steps: int
) -> Step:
    """One step of GRPO: sample and score completions, update the policy, measure, adjust beta.

    `step` counts from 0, and with the seed it determines every draw. After a RewardError the weights are as they were.
    """
    config, rate = context.config, float(optimizer.param_groups[0]["lr"])
    beta, coefficient = context.control.beta(step, total_steps), config.teacher.coefficient(step, total_steps)
    others = tuple(Weighted(coefficient, term) for _, term in context.objective.others)
    objective = replace(context.objective, beta=beta, others=others)
    rollout = collect(context, examples, step=step, beta=beta, others=others)
    outputs: list[UpdateOutput] = []
    for _ in range(config.optim.num_iterations):
        outputs.append(update(context, optimizer, rollout, objective))
        if outputs[-1].stopped:
            break
        rollout = with_old_logprobs(rollout, outputs[0])
    metrics = measured(context, rollout, outputs) | {"train/learning_rate": rate}
    metrics |= control_metrics(context, beta, metrics) | ({"teacher/coef": coefficient} if others else {})
    if (kl := held_kl(metrics, exact_everywhere=context.exact_everywhere)) is not None:
        context.control.update(kl, metrics, rollout.rewards.view(-1, config.rollout.num_generations))
    return Step(rollout, outputs[0], metrics)


class Trainer:
    """A run of a configuration: how far it is, what it measured last, and the observers that are told of it."""

    step_zero_kl = STEP_ZERO_KL
    """KL per token before the first update that is worth a warning."""

    def __init__(self, context: Context, observers: Sequence[Observer]) -> None:
        self.context = context
        self.optimizer = adamw(context.policy, context.config)
        self.schedule = schedule_of(self.optimizer, context.config)
        self.alarms = AlarmObserver(self.tell, rl_skill=context.task.rl_skill, stop_on=context.config.run.stop_on)
        self.observers = [*observers, self.alarms]
        self.step = 0
        self.saved: tuple[int, Path | None] = (0, None)
        self.before: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.changes = ""
        self.whole = True
        """Whether the weights are those of the last step done, and not half way through the next one."""
        self.optimizer.register_step_pre_hook(self._begin_update)
        self.fingerprints = fingerprints(context)
        self.identity: Mapping[str, Any] = {}

    def _begin_update(self, *_: object) -> None:
        self.whole = False

    @classmethod
    def train(cls, config: TrainConfig, observers: Sequence[Observer]) -> RunSummary:
        """Run a configuration to its last step, from its newest checkpoint if it is to be resumed."""
        check_processes(config)
        check_trackers(config)
        with opened_folder(config) as folder:
            everyone = [RunLog(), *observers]
            try:
                saved = checkpoint.whole_newest(folder) if config.run.resume else None
                going = check_resume(config, folder)
                run = cls(build(config, folder, observers, resumed=saved), everyone)
                run.changes = going[1] if going else ""
                if saved is not None:
                    run.resume(saved)
                run.tell(lambda o: o.on_start(run.info()))
                context = run.context
                run.warn(*chat_cautions(config.task, context.tokenizer, context.stop))
                return run.run()
            finally:
                for observer in everyone:
                    observer.close()

    def run(self) -> RunSummary:
        """Take all steps that are left; if the run ends early, the state is saved."""
        started = time.perf_counter()
        self.begin()
        with deferred_interrupts() as interrupt:
            try:
                while self.step < self.context.config.run.max_steps:
                    self.end_step(self.train_step(), interrupt)
            except KeyboardInterrupt as stop:
                raise self.stopped(*self.kept()) from stop
            except KlampError as error:
                step, folder = self.kept()
                if folder is not None:
                    error.add_note(f"  the state after step {step} is saved in {folder}")
                raise
        summary = RunSummary(
            output_dir=self.context.output_dir,
            steps=self.step,
            seconds=time.perf_counter() - started,
            rl_skill=self.context.task.rl_skill,
            before=self.before,
            after=self.after,
            final_metrics=self.metrics,
        )
        self.tell(lambda o: o.on_end(summary))
        return summary

    def begin(self) -> None:
        """Measure the reference's length if a clip needs it; evaluate, unless the records hold these scores."""
        measure_reference_length(self.context)
        if not self.before or (self.is_due(self.context.config.run.eval_every) and not self.after):
            self.after = self.evaluate()
            self.before = self.before or self.after

    def train_step(self) -> dict[str, float]:
        """Take the next step; returns its metrics."""
        started, context = time.perf_counter(), self.context
        steps = context.config.run.max_steps
        step = take_step(context, self.optimizer, self.prompts(self.step), step=self.step, total_steps=steps)
        self.schedule.step()
        if self.step == 0:
            self._check_step_zero(step.metrics)
        self._show_completions(step)
        self.step += 1
        for anchor in (context.reference, context.teachers):
            if anchor is not None:
                anchor.after_step(context.policy, self.step)
        self.whole = True
        seconds = max(time.perf_counter() - started, 1e-9)
        tokens = float(step.rollout.totals.tokens)
        return step.metrics | {"speed/step_seconds": seconds, "speed/tokens_per_second": tokens / seconds}

    def end_step(self, metrics: dict[str, float], interrupt: Interrupt) -> None:
        """Tell of a step that is done, evaluate and save where that is due; raise if the run ends early."""
        run = self.context.config.run
        self.metrics = metrics
        self.tell(lambda o: o.on_step(self.step, metrics))
        if self.is_due(run.eval_every):
            self.after = self.evaluate()
        if self.is_due(run.save_every):
            self.save()
        if self.step == run.max_steps:
            return
        if stopped := self.alarms.stopped(self.step, run.max_steps):
            raise stopped
        if interrupt.asked:
            raise KeyboardInterrupt

    def prompts(self, step: int) -> list[Example]:
        """The prompts of a step: consecutive slices of a fresh order in every epoch."""
        rows, config = self.context.task.train, self.context.config
        picked = examples_of_step(step, len(rows), size=config.rollout.prompts_per_step, seed=config.run.seed)
        return [rows[i] for i in picked]

    def evaluate(self) -> dict[str, float]:
        """Evaluate every skill now and tell the observers; after the last step with the teacher's answers too."""
        evaluation, last = evaluate(self.context), self.step == self.context.config.run.max_steps
        answers = [*evaluation.answers, *(teacher_answers(self.context) if last else ())]
        self.tell(lambda o: o.on_evaluation(self.step, evaluation.scores))
        self.tell(lambda o: o.on_answers(self.step, answers))
        return evaluation.scores

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps (0: only at the end) is to be done after this one."""
        return self.step == self.context.config.run.max_steps or bool(every and self.step % every == 0)

    # checkpoints ------------------------------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """Write a checkpoint of the last step done, unless this run has saved that step before."""
        if self.saved[0] != self.step:
            context = self.context
            self.identity = self.identity or identity(context.config)
            folder = checkpoint.save(
                context.output_dir,
                self.step,
                policy=context.policy,
                tokenizer=context.tokenizer,
                optimizer=self.optimizer,
                anchors=self._moving(),
                documents={checkpoint.STATE_FILE: self._state(), IDENTITY: self.identity},
                keep=context.config.run.keep_checkpoints,
            )
            self.saved = (self.step, folder)
            self.tell(lambda o: o.on_checkpoint(self.step, folder))
        return self.saved[1]

    def _moving(self) -> dict[str, nn.Module]:
        """The weights of a reference and a teacher that move, which are nowhere else."""
        anchors = {"reference": self.context.reference, "teacher": self.context.teachers}
        weights = {name: None if anchor is None else anchor.weights() for name, anchor in anchors.items()}
        return {name: model for name, model in weights.items() if model is not None}

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            **self.context.control.state_dict(),
            "fingerprints": self.fingerprints,
            "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
        }

    def kept(self) -> tuple[int, Path | None]:
        """The step to continue from and its folder: the last one done, or in mid-update the newest on disk."""
        if self.whole and self.context.output_dir.is_dir():
            with suppress(KeyboardInterrupt, RunFolderError):  # impatience or a full disk: an older one is there
                return self.step, self.save()
        saved = checkpoints(self.context.output_dir)
        return (number_of(saved[-1]), saved[-1]) if saved else (0, None)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, whose policy is loaded."""
        state = checkpoint.load_state(folder)
        check_same(dict(state.get("fingerprints") or {}), self.fingerprints, checkpoint=folder)
        self.identity = identity(self.context.config, folder)
        checkpoint.load_optimizer(folder, self.optimizer)
        checkpoint.load_anchors(folder, self._moving())
        with checkpoint.reading(folder):
            self.schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None]})  # the function is not saved
            if repr(self.schedule.last_epoch) != repr(state["step"]):
                raise TypeError(f"last_epoch of the schedule is {self.schedule.last_epoch!r}")
            go_on_from(self.schedule, state["step"], self.context.config.optim.learning_rate)
            self.context.control.load_state_dict(state)
            self.step = state["step"]
        self.saved = (self.step, folder)
        self._recall()

    def _recall(self) -> None:
        """Take up what metrics.jsonl says of the steps that are done: the first scores, the last step, its scores."""
        rows = lines_until(self.context.output_dir / METRICS_FILE, self.step)
        evaluated, steps = [row for row in rows if scores_of(row)], [row for row in rows if "reward" in row]
        self.before = scores_of(evaluated[0]) if evaluated else {}
        self.metrics = {name: x for name, x in steps[-1].items() if name != "step"} if steps else {}
        self.after = scores_of(evaluated[-1]) if evaluated and evaluated[-1]["step"] == self.step else {}

    # what others are told ---------------------------------------------------------------------------------------------

    def tell(self, hook: Callable[[Observer], None]) -> None:
        """Call a hook of every observer."""
        for observer in self.observers:
            hook(observer)

    def warn(self, *texts: str) -> None:
        """Tell every observer of cautions."""
        for text in texts:
            self.tell(lambda o, text=text: o.on_warning(text))

    def _check_step_zero(self, metrics: Mapping[str, float]) -> None:
        """Warn if an anchor is the policy itself, and the KL to it before the first update is not 0."""
        context, config, teacher = self.context, self.context.config, self.context.config.teacher
        itself = teacher.kind in OF_THE_POLICY or teacher.teacher_model == config.model.model
        kl = abs(metrics.get("teacher/kl", 0.0))
        if itself and not teacher.teacher_prompt and kl > self.step_zero_kl:
            self.warn(
                f"The KL to the teacher before the first update is {metrics['teacher/kl']:.2e} nats per token and "
                "should be about 0: it is the same model at the same prompts. Its numbers likely belong to other "
                "tokens, or to another temperature."
            )
        kl = metrics.get("kl/k3", 0.0)
        if kl > self.step_zero_kl and not config.model.ref_model:
            model = context.reference.model if isinstance(context.reference, FrozenReference) else None
            reasons = likely_reasons(context.policy, model, adapter=config.model.lora_r > 0, loaded=False)
            self.warn(step_zero_text(kl, reasons))

    def _show_completions(self, step: Step) -> None:
        run = self.context.config.run
        if not run.log_completions or (self.step and (self.step + 1) % run.log_completions_every):
            return
        shown = min(run.log_completions, len(step.rollout.texts))
        rows = [completion_row(self.context, step.rollout, step.first, i) for i in range(shown)]
        self.tell(lambda o: o.on_completions(self.step + 1, rows))

    def stopped(self, step: int, folder: Path | None) -> TrainingStopped:
        """The error that ends an interrupted run, with the step to continue from and its checkpoint."""
        why, fix = "no step was saved yet", "start it again in another folder, or in this one, with --resume"
        if folder is not None:
            why = f"the state after step {step} is saved in {folder}"
            fix = f"continue with: klamp train --resume {self.context.output_dir}"
        what = f"training was stopped after step {self.step} of {self.context.config.run.max_steps}"
        return TrainingStopped(what, got="an interrupt", resumable=folder is not None, why=why, fix=fix)

    def info(self) -> RunInfo:
        """What is known before the first step."""
        context = self.context
        every = sum(p.numel() for p in context.policy.parameters())
        trained = sum(p.numel() for p in context.policy.parameters() if p.requires_grad)
        return RunInfo(
            config=context.config,
            output_dir=context.output_dir,
            start_step=self.step,
            parameters=every - trained if context.config.model.lora_r else every,
            trainable_parameters=trained,
            reference="none" if context.reference is None else context.reference.describe(),
            device=str(context.device),
            changes=self.changes,
        )
