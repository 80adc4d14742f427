"""The loop of `klamp train`, from top to bottom.

    take_step   one step: sample, score, update, measure, adjust beta
    train       the plain loop over steps, for a model and a reward function
    log_train   a line and TensorBoard scalars per step
    Trainer     the loop of a configuration: schedule, evaluation, checkpoints, alarms, resume

`train` and `log_train` are functions of a guide (docs/sources.md), as are those of `klamp.training.microbatch`; all
five are exported by `klamp.training.loop`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from klamp.config.rules import check_beta
from klamp.config.teacher import OF_THE_POLICY
from klamp.core.objective import Weighted
from klamp.errors import DataError, KlampError, RunFolderError, TrainingStopped
from klamp.hosts.common.control import go_on_from, held_kl
from klamp.hosts.common.step_zero import STEP_ZERO_KL, likely_reasons, step_zero_text
from klamp.scoring.model_parts import output_size
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer
from klamp.tasks.base import Example, Task, checked
from klamp.tasks.prompts import chat_cautions
from klamp.training import checkpoint
from klamp.training.config import OptimConfig, RolloutConfig, RunConfig, TrainConfig
from klamp.training.context import Context
from klamp.training.evaluation import evaluate, teacher_answers
from klamp.training.fingerprints import check_same, fingerprints
from klamp.training.folders import METRICS_FILE, lines_until, number_of, opened_folder, scores_of
from klamp.training.interrupts import Interrupt, deferred_interrupts
from klamp.training.microbatch import needed_reference, printed_kl, printed_loss
from klamp.training.models import end_tokens
from klamp.training.observers import AlarmObserver, Observer, RunInfo, RunSummary
from klamp.training.optimizer import adamw, schedule_of
from klamp.training.references import FrozenReference
from klamp.training.resumed import IDENTITY, check_resume, continued, identity
from klamp.training.rollouts import Rollout, collect, measure_reference_length
from klamp.training.runlog import RunLog, check_trackers
from klamp.training.sampling import examples_of_step
from klamp.training.setup import build, check_alone
from klamp.training.updates import (
    UpdateOutput,
    completion_row,
    control_metrics,
    measured,
    speed,
    update,
    with_old_logprobs,
)

RewardFunction = Callable[[str, str], float]
"""reward(prompt, completion) -> a finite number."""

log = logging.getLogger("klamp.training.loop")


class ScalarWriter(Protocol):
    """What `log_train` needs of a TensorBoard SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Record one number."""
        ...


class Step(NamedTuple):
    """What one step of GRPO gave."""

    rollout: Rollout
    """The completions that were trained on."""
    first: UpdateOutput
    """What its first update measured."""
    metrics: dict[str, float]
    """Name -> value, names as in `klamp.diagnostics.metrics`."""


def take_step(
    context: Context, optimizer: Optimizer, examples: Sequence[Example], *, step: int, total_steps: int
) -> Step:
    """One step of GRPO: sample and score completions, update the policy, measure, adjust beta.

    Args:
        context: the run.
        optimizer: of its policy.
        examples: the prompts of the step.
        step: its number, from 0; with the seed it determines every draw.
        total_steps: of the run, by which beta and the teacher's coefficient are scheduled.

    Raises:
        RewardError: the reward failed; the weights are as they were.
        NonFiniteError: a loss, a gradient or a KL that is not finite.
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
    metrics |= control_metrics(context, beta, metrics)
    if others:
        metrics["teacher/coef"] = coefficient
    kl = held_kl(metrics, exact_everywhere=context.exact_everywhere)
    if kl is not None:
        context.control.update(kl, metrics, rollout.rewards.view(-1, config.rollout.num_generations))
    return Step(rollout, outputs[0], metrics)


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    reward: RewardFunction,
    optimizer: Optimizer,
    *,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    steps: int = 100,
    rollout: RolloutConfig | None = None,
    optim: OptimConfig | None = None,
    seed: int = 0,
    writer: ScalarWriter | None = None,
) -> list[dict[str, float]]:
    """The whole GRPO loop on one process, in its plainest form.

    Each step takes the next prompts, samples a group of completions for each, scores them, forms advantages, adds up
    the gradients of the micro-batches and steps the optimizer. What is recorded of it is that of its tokens before the
    update: `klamp doctor` reads the TensorBoard folder as fully as that of `klamp train`.

    Args:
        model: the policy, a causal LM; changed in place.
        tokenizer: its tokenizer.
        prompts: taken in order, over and over.
        reward: (prompt, completion) -> number.
        optimizer: over the model's parameters.
        ref_model: the frozen reference; needed where kl_coef > 0.
        kl_coef: coefficient of the KL.
        steps: optimizer steps.
        rollout: group size, lengths, temperature; the defaults of `RolloutConfig`.
        optim: micro-batches per step and the bound of the gradient's norm; the defaults of `OptimConfig`.
        seed: of the sampling.
        writer: a TensorBoard SummaryWriter.

    Returns:
        One dictionary of numbers per step, as given to `log_train`: `loss`, `policy_loss`, `kl_penalty`, `grad_norm`,
        `learning_rate`, and under klamp's names (docs/metrics.md) what `step_metrics` finds, `beta` and `beta/price`.
        Without a reference there is no KL among them.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
        DataError: no prompts.
        RewardError: the reward raised or ended the program, or returned something that is not a finite number.
    """
    if not prompts:
        raise DataError("there are no prompts", got="prompts=[]", why="a rollout needs one", fix="pass at least one")
    check_beta(kl_coef, name="kl_coef")
    scored = checked(lambda example, text: reward(example.prompt, text), name=getattr(reward, "__name__", "reward"))
    rows = [Example(prompt=prompt) for prompt in prompts]
    config = TrainConfig(
        kl=printed_kl(kl_coef),
        loss=printed_loss(),
        rollout=rollout or RolloutConfig(),
        optim=optim or OptimConfig(),
        run=RunConfig(seed=seed, exact_kl_completions=0),
    )
    context = Context(
        config=config,
        output_dir=Path(),
        policy=model,
        scorer=Scorer(model, probe(model)),
        reference=FrozenReference(needed_reference(ref_model, kl_coef)) if kl_coef > 0 else None,
        tokenizer=tokenizer,
        task=Task(name="", train=rows, evaluation={}, rl_skill="", score=scored),
        stop=end_tokens(model, tokenizer),
        vocabulary=output_size(model),
    )
    history: list[dict[str, float]] = []
    for step in range(steps):
        first = step * config.rollout.prompts_per_step
        chosen = [rows[(first + i) % len(rows)] for i in range(config.rollout.prompts_per_step)]
        taken = take_step(context, optimizer, chosen, step=step, total_steps=steps)
        metrics = {name.removeprefix("train/"): value for name, value in taken.metrics.items()}
        log_train(step + 1, metrics, writer=writer)
        history.append(metrics)
    return history


def log_train(step: int, metrics: Mapping[str, float], *, writer: ScalarWriter | None = None) -> str:
    """Record a step: TensorBoard scalars `train/NAME` and one line to the logger `klamp.training.loop`.

    Args:
        step: number of the step, from 1.
        metrics: name -> value; `loss`, `grad_norm`, `reward` and `kl_penalty` come first in the line.
        writer: a TensorBoard SummaryWriter; gets `train/loss`, `train/kl_penalty` and the rest.

    Returns:
        The line: `Step 1 | Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000 | KL penalty: 0.0012`.
    """
    if writer is not None:
        for name, value in metrics.items():
            writer.add_scalar(f"train/{name}", value, step)
    names = {"loss": "Loss", "grad_norm": "Grad norm", "reward": "Reward", "kl_penalty": "KL penalty"}
    rounded = {name: round(metrics[name], 4) + 0.0 for name in names if name in metrics}  # -0.0000 says nothing
    shown = [f"{names[name]}: {value:.4f}" for name, value in rounded.items()]
    line = " | ".join([f"Step {step}", *shown])
    log.info(line)
    return line


class Trainer:
    """A run of a configuration: how far it is, what it measured last, and whom it tells.

    Args:
        context: the run, loaded by `klamp.training.setup.build`.
        observers: told what happens.
    """

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
        self.noted: list[str] = []
        self.whole = True
        """Whether the weights are those of the last step done, and not half way through the next one."""
        self.optimizer.register_step_pre_hook(self._begin_update)
        self.fingerprints = fingerprints(context)
        self.identity: Mapping[str, Any] = {}

    def _begin_update(self, *_: object) -> None:
        self.whole = False

    @classmethod
    def train(cls, config: TrainConfig, observers: Sequence[Observer]) -> RunSummary:
        """Run a configuration to its last step, from its newest checkpoint if it is to be resumed.

        Args:
            config: what to run.
            observers: told what happens; the run's folder and trackers are served besides.

        Raises:
            KlampError: bad input before any work, or an error in the run with its state saved; see `klamp.errors`.
        """
        check_alone()
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
                run.warn(*run.cautions(), *run.noted)
                return run.run()
            finally:
                for observer in everyone:
                    observer.close()

    def run(self) -> RunSummary:
        """Take all steps that are left.

        Raises:
            TrainingStopped: interrupted, or an alarm of stop_on; the state is saved.
            KlampError: a reward or a loss that cannot be used; the state is saved.
        """
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
        if not self.before:
            self.before = self.after = self.evaluate()
        elif self.is_due(self.context.config.run.eval_every) and not self.after:
            self.after = self.evaluate()

    def train_step(self) -> dict[str, float]:
        """Take the next step; returns its metrics."""
        started, context = time.perf_counter(), self.context
        steps = context.config.run.max_steps
        step = take_step(context, self.optimizer, self.prompts(self.step), step=self.step, total_steps=steps)
        self.schedule.step()
        self._check_step_zero(step.metrics)
        self._show_completions(step)
        self.step += 1
        for anchor in (context.reference, context.teachers):
            if anchor is not None:
                anchor.after_step(context.policy, self.step)
        self.whole = True
        return step.metrics | speed(float(step.rollout.totals.tokens), time.perf_counter() - started)

    def end_step(self, metrics: dict[str, float], interrupt: Interrupt) -> None:
        """Tell of a step that is done, evaluate and save where that is due.

        Raises:
            KeyboardInterrupt, TrainingStopped: it was interrupted, or an alarm of stop_on ends it.
        """
        run = self.context.config.run
        self.metrics = metrics
        self.tell(lambda o: o.on_step(self.step, metrics))
        if self.is_due(run.eval_every):
            self.after = self.evaluate()
        if self.is_due(run.save_every):
            self.save()
        if self.step == run.max_steps:
            return
        if self.alarms.stopped_by is not None:
            raise self.alarms.stop(self.step, run.max_steps)
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
        saved = checkpoint.checkpoints(self.context.output_dir)
        return (number_of(saved[-1]), saved[-1]) if saved else (0, None)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, whose policy is loaded.

        Raises:
            RunFolderError: it is damaged.
            ConfigError: the task, the reference or the teacher is another one than it was.
        """
        state = checkpoint.load_state(folder)
        check_same(dict(state.get("fingerprints") or {}), self.fingerprints, checkpoint=folder)
        self.identity = continued(self.context.config, folder)
        checkpoint.load_optimizer(folder, self.optimizer)
        checkpoint.load_anchors(folder, self._moving())
        with checkpoint.reading(folder):
            known = {name: state["schedule"][name] for name in self.schedule.state_dict() if name in state["schedule"]}
            self.schedule.load_state_dict({**known, "lr_lambdas": [None]})  # the function is not saved
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

    def cautions(self) -> Iterable[str]:
        """What the user should know before the first step."""
        return chat_cautions(self.context.config.task, self.context.tokenizer, self.context.stop)

    def _check_step_zero(self, metrics: Mapping[str, float]) -> None:
        """Warn if an anchor is the policy itself, and the KL to it before the first update is not 0."""
        context, config, teacher = self.context, self.context.config, self.context.config.teacher
        if self.step:
            return
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
        shown = range(min(run.log_completions, len(step.rollout.texts)))
        rows = [completion_row(self.context, step.rollout, step.first, i) for i in shown]
        self.tell(lambda o: o.on_completions(self.step + 1, rows))

    def stopped(self, step: int, folder: Path | None) -> TrainingStopped:
        """The error that ends an interrupted run.

        Args:
            step: the step to continue from.
            folder: its checkpoint; None: there is none.
        """
        return TrainingStopped(
            f"training was stopped after step {self.step} of {self.context.config.run.max_steps}",
            got="an interrupt",
            resumable=folder is not None,
            why=f"the state after step {step} is saved in {folder}" if folder else "no step was saved yet",
            fix=f"continue with: klamp train --resume {self.context.output_dir}"
            if folder
            else "start it again in another folder, or in this one from its first step, with --resume",
        )

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
