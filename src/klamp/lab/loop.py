"""klamp's own loop, from the KL of a token to a whole run.

    compute_kl_divergence   the KL of each token
    compute_loss            clipped policy loss plus KL
    grpo_microbatch_step    forward and backward pass of one micro-batch
    take_step               a step: sample, score, update, measure, adjust beta
    train                   steps for a model and a reward function
    log_train               a line and TensorBoard scalars per step
    Trainer                 a configured run: schedule, evaluation, checkpoints, alarms, resume

All but `take_step` and `Trainer` are the functions of a guide from scratch (docs/sources.md). Its loss, differentiated
as printed, has an expected gradient of zero: here the gradient follows KL(policy || ref).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.kl import check_beta
from klamp.config.teacher import OF_THE_POLICY
from klamp.core.arguments import FLOATS, MASKS, check_tensors
from klamp.core.gradients import kl_penalty
from klamp.core.masking import Totals, masked_mean
from klamp.core.objective import grpo_loss
from klamp.core.types import Batch, LogProbs, Mask, TokenValues
from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.hosts.common.anchors import STEP_ZERO_KL, check_apart, check_same
from klamp.hosts.common.control import go_on_from, held_kl
from klamp.lab import checkpoint, updates
from klamp.lab.anchors import LocalReference, check_tokens_of
from klamp.lab.checkpoint import check_resume, identity
from klamp.lab.config import OptimConfig, RolloutConfig, RunConfig, TrainConfig
from klamp.lab.evaluation import evaluate, fingerprints, teacher_answers
from klamp.lab.folders import checkpoints, number_of, opened_folder
from klamp.lab.interrupts import Interrupt, deferred_interrupts
from klamp.lab.observers import AlarmObserver, Observer, RunInfo, RunLog, RunSummary, check_trackers, stopped_by
from klamp.lab.rollouts import Rollout, collect, measure_reference_length
from klamp.lab.sampling import examples_of_step
from klamp.lab.setup import Context, build, check_processes
from klamp.lab.tasks.base import Example, Task, checked
from klamp.lab.tasks.files import chat_cautions
from klamp.names import IDENTITY
from klamp.scoring.completions import Completions
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Ask, Scorer, score

__all__ = ["compute_kl_divergence", "compute_loss", "grpo_microbatch_step", "log_train", "train"]

log = logging.getLogger("klamp.training.loop")


def compute_kl_divergence(policy_log_probs: LogProbs, ref_log_probs: LogProbs) -> TokenValues:
    """Per-token KL(policy || ref) in nats: the value of k1, the gradient of the reverse KL.

    Equation: log policy - log ref.

    Sampler: the policy.
    Value: k1, unbiased, of any sign.
    Gradient: (log policy - log ref) grad log policy, whose expectation is the gradient of KL(policy || ref) at each
    prefix; the formula's own gradient is zero in expectation.
    Shapes: [B, T], [B, T] -> [B, T].

    Raises:
        TensorError: no tensors of log-probabilities.
        ShapeError: the two differ in shape.

    Source: the from-scratch guide (docs/sources.md); docs/which-kl.md
    """
    check_tensors(FLOATS, policy_log_probs=policy_log_probs, ref_log_probs=ref_log_probs)
    everywhere = torch.ones_like(policy_log_probs, dtype=torch.bool)
    return kl_penalty(policy_log_probs, ref_log_probs, everywhere, value="k1", gradient="reverse")


def compute_loss(
    policy_log_probs: LogProbs,
    old_log_probs: LogProbs | None,
    advantages: Tensor,
    response_mask: Mask,
    *,
    ref_log_probs: LogProbs | None = None,
    kl_coef: float = 0.0,
    cliprange: float = 0.2,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss plus KL penalty, averaged over the response tokens.

    Equation: mean_t(-min(r A, clip(r) A)) + kl_coef * mean_t KL_t.

    Value: with the defaults exactly as the from-scratch guide prints it.
    Gradient: PPO's plus kl_coef times the gradient of KL(policy || ref) at each prefix.
    Shapes: [B, T] each, advantages [B] or [B, T] -> scalar and a dictionary of detached scalars.

    Args:
        old_log_probs: under the policy at rollout time; None: the policy itself.
        ref_log_probs: under the reference; needed where kl_coef > 0.
        totals: size of the whole batch if this is a micro-batch.

    Returns:
        The loss and metadata: `kl_penalty_mean` (what the KL adds to the loss), `kl_mean` (mean k1 in nats per
        token), `policy_loss`, `clip_fraction`, `log_prob_mean`.

    Raises:
        ConfigError: kl_coef > 0 without ref_log_probs, or NaN.
        TensorError, ShapeError, EmptyMaskError, NonFiniteError: tensors that cannot be used.

    Source: the from-scratch guide (docs/sources.md)
    """
    check_beta(kl_coef, name="kl_coef")
    check_tensors(MASKS, response_mask=response_mask)
    objective = build_objective(printed_kl(kl_coef), printed_loss(cliprange), max_length=1)
    batch = Batch(
        policy_logprobs=policy_log_probs,
        mask=response_mask,
        advantages=advantages,
        old_logprobs=old_log_probs,
        ref_logprobs=ref_log_probs,
    )
    output = grpo_loss(batch, objective, totals=totals)
    nothing = torch.zeros_like(output.loss.detach())
    metadata = {
        "policy_loss": output.metrics["train/policy_loss"],
        "kl_penalty_mean": output.metrics.get("train/kl_penalty", nothing),
        "kl_mean": output.metrics.get("kl/k1", nothing),
        "clip_fraction": output.metrics["policy/ratio_clipped"],
        "log_prob_mean": masked_mean(policy_log_probs.detach(), response_mask),
    }
    return output.loss, metadata


def printed_kl(kl_coef: float) -> KLConfig:
    """The guide's KL: k1, with the gradient of the reverse KL."""
    return KLConfig(beta=kl_coef, kl_estimator="k1", kl_gradient="reverse")


def printed_loss(cliprange: float = 0.2) -> LossConfig:
    """A mean over all tokens; unchanged `group_advantages`: less the group's mean, over its deviation."""
    return LossConfig(loss_type="dapo", advantage_baseline="mean", epsilon=cliprange)


def grpo_microbatch_step(
    model: nn.Module,
    completions: Completions,
    advantages: Tensor,
    *,
    old_log_probs: LogProbs | None = None,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    cliprange: float = 0.2,
    temperature: float = 1.0,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward pass of one micro-batch; the gradients are added to the model's.

    The reference is scored only if there is one and kl_coef > 0, without gradient.

    Args:
        model: the policy; or its `Scorer`, which `Trainer` uses: equal numbers, for less memory and time.
        temperature: the sampler's.
        totals: size of the whole batch; with it, micro-batches add up exactly to the batch.

    Returns:
        The detached loss and the metadata of `compute_loss`.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
    """
    reference = needed_reference(ref_model, kl_coef, model)
    with torch.no_grad():
        ref_log_probs = None if reference is None else _log_probs(reference, completions, temperature)
    loss, metadata = compute_loss(
        _log_probs(model, completions, temperature),
        old_log_probs,
        advantages,
        completions.mask,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        cliprange=cliprange,
        totals=totals,
    )
    loss.backward()
    return loss.detach(), metadata


def needed_reference(ref_model: nn.Module | None, kl_coef: float, policy: nn.Module) -> nn.Module | None:
    """The reference; None if `kl_coef` is 0, an error if it is missing or has trained weights of the policy."""
    check_beta(kl_coef, name="kl_coef")
    if kl_coef == 0:
        return None
    if ref_model is None:
        got, why = f"kl_coef={kl_coef}, ref_model=None", "a KL needs something to be the distance to"
        fix = "pass ref_model (a frozen copy of the starting policy), or kl_coef=0"
        raise ConfigError("kl_coef is positive and there is no reference", got=got, why=why, fix=fix)
    check_apart(*(x.model if isinstance(x, Scorer) else x for x in (ref_model, policy)))
    return ref_model


def _log_probs(model: nn.Module, completions: Completions, temperature: float) -> LogProbs:
    if isinstance(model, Scorer):
        return model(completions, Ask(temperature=temperature)).logprobs
    return score(model, completions, temperature=temperature).logprobs


def take_step(
    context: Context, optimizer: Optimizer, examples: Sequence[Example], *, step: int, total_steps: int
) -> tuple[Rollout, dict[str, float]]:
    """One step of GRPO: sample and score completions, update the policy, measure, adjust beta; and its metrics.

    `step` counts from 0, and with the seed it determines every draw. After a RewardError the weights are as they were.
    """
    config, rate = context.config, float(optimizer.param_groups[0]["lr"])
    beta, coefficient = context.control.beta(step, total_steps), config.teacher.coefficient(step, total_steps)
    objective = context.objective.weighted(beta, teacher=coefficient)
    rollout = collect(context, examples, step=step, terms=objective.terms)
    outputs: list[updates.UpdateOutput] = []
    for _ in range(config.optim.num_iterations):
        outputs.append(updates.update(context, optimizer, rollout, objective))
        rollout = updates.with_old_logprobs(rollout, outputs[0])
        if outputs[-1].grad_norm is None:
            break
    metrics = updates.measured(context, rollout, outputs) | {"train/learning_rate": rate}
    metrics |= updates.control_metrics(context, beta, metrics)
    metrics |= {"teacher/coef": coefficient} if config.teacher.there else {}
    if (kl := held_kl(metrics, exact_everywhere=context.exact_everywhere)) is not None:
        context.control.update(kl, metrics, rollout.rewards.view(-1, config.rollout.num_generations))
    return rollout, metrics


def train(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    reward: Callable[[str, str], float],
    optimizer: Optimizer,
    *,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    steps: int = 100,
    rollout: RolloutConfig | None = None,
    optim: OptimConfig | None = None,
    seed: int = 0,
    writer: Any = None,
) -> list[dict[str, float]]:
    """The whole GRPO loop on one process, in its plainest form.

    A step takes the next prompts, samples a group of completions for each, scores them, forms advantages and updates
    the policy. `klamp doctor` reads the TensorBoard folder like one of `klamp train`.

    Args:
        model: the policy, a causal LM; changed in place.
        prompts: taken in order, over and over.
        reward: (prompt, completion) -> number.
        ref_model: the frozen reference; needed where kl_coef > 0.
        rollout: group size, lengths, temperature; the defaults of `RolloutConfig`.
        optim: micro-batches per step and the bound of the gradient's norm; the defaults of `OptimConfig`.
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
    frozen = needed_reference(ref_model, kl_coef, model)
    if frozen is not None and (name := getattr(getattr(frozen, "config", None), "_name_or_path", "")):
        check_tokens_of(name, tokenizer, who="reference")
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
        scorer=Scorer(model, probe(model)),
        reference=None if frozen is None else LocalReference(frozen.requires_grad_(False).eval()),
        tokenizer=tokenizer,
        task=Task(name="", train=rows, evaluation={}, rl_skill="", score=scored),
    )
    history: list[dict[str, float]] = []
    for step in range(steps):
        first = step * config.rollout.prompts_per_step
        chosen = [rows[(first + i) % len(rows)] for i in range(config.rollout.prompts_per_step)]
        _, metrics = take_step(context, optimizer, chosen, step=step, total_steps=steps)
        metrics = {name.removeprefix("train/"): value for name, value in metrics.items()}
        log_train(step + 1, metrics, writer=writer)
        history.append(metrics)
    return history


def log_train(step: int, metrics: Mapping[str, float], *, writer: Any = None) -> str:
    """Record a step: TensorBoard scalars `train/NAME` and one line to the logger `klamp.training.loop`.

    Returns:
        The line: `Step 1 | Loss: 0.1234 | Grad norm: 0.5678 | Reward: 0.5000 | KL penalty: 0.0012`.
    """
    if writer is not None:
        for name, value in metrics.items():
            writer.add_scalar(f"train/{name}", value, step)
    labels = {"loss": "Loss", "grad_norm": "Grad norm", "reward": "Reward", "kl_penalty": "KL penalty"}
    shown = [f"{labels[name]}: {metrics[name]:z.4f}" for name in labels if name in metrics]  # z: no -0.0000
    line = " | ".join([f"Step {step}", *shown])
    log.info(line)
    return line


class Trainer:
    """A run of a configuration: its progress, and its observers."""

    def __init__(self, context: Context, observers: Sequence[Observer], folder: Path = Path()) -> None:
        config = context.config
        self.context, self.folder, self.step = context, folder, 0
        self.optimizer = updates.adamw(context.policy, config)
        self.optimizer.register_step_pre_hook(lambda *_: setattr(self, "whole", False))
        self.schedule = updates.schedule_of(self.optimizer, config)
        moving = {name: anchor.average for name, anchor in context.moving.items()}
        self.weights = checkpoint.Weights(context.policy, context.tokenizer, self.optimizer, moving)
        self.alarms = AlarmObserver(self.tell, rl_skill=context.task.rl_skill)
        self.observers = [*observers, self.alarms]
        self.whole = True  # whether the weights belong to a finished step, not to half of the next one
        self.fingerprints = fingerprints(context)

    @classmethod
    def train(cls, config: TrainConfig, observers: Sequence[Observer]) -> RunSummary:
        """Run a configuration to its last step, from its newest checkpoint if it is to be resumed."""
        check_processes(config)
        check_trackers(config)
        with opened_folder(config) as folder:
            everyone = [RunLog(), *observers]
            try:
                saved = checkpoint.whole_newest(folder) if config.run.resume else None
                _, changes = check_resume(config, folder) or (0, "")
                run = cls(build(config, observers, resumed=saved), everyone, folder)
                if saved is not None:
                    run.resume(saved)
                run.tell(lambda o: o.on_start(run.info(changes)))
                for text in chat_cautions(config.task, run.context.tokenizer, run.context.stop):
                    run.tell(lambda o, text=text: o.on_warning(text))
                return run.run()
            finally:
                for observer in everyone:
                    observer.close()

    def run(self) -> RunSummary:
        """Take all steps that are left; if the run ends early, the state is saved."""
        started = time.perf_counter()
        measure_reference_length(self.context)
        past = self.alarms.watch.history
        evaluated = past.evaluations[-1].step if past.evaluations else None
        if evaluated is None or (evaluated < self.step and self.is_due(self.context.config.run.eval_every)):
            self.evaluate()
        with deferred_interrupts() as interrupt:
            try:
                while self.step < self.context.config.run.max_steps:
                    self.end_step(self.train_step(), interrupt)
            except KeyboardInterrupt as stop:
                raise self.stopped() from stop
            except KlampError as error:
                step, folder = self.save_whole()
                if folder is not None:
                    error.add_note(f"  the state after step {step} is saved in {folder}")
                raise
        summary = RunSummary(
            output_dir=self.folder,
            steps=self.step,
            seconds=time.perf_counter() - started,
            rl_skill=self.context.task.rl_skill,
            before=past.evaluations[0].metrics,
            after=past.evaluations[-1].metrics,
            final_metrics=past.rows[-1].metrics if past.rows else {},
        )
        self.tell(lambda o: o.on_end(summary))
        return summary

    def train_step(self) -> dict[str, float]:
        """Take the next step; returns its metrics."""
        started, context, run = time.perf_counter(), self.context, self.context.config.run
        examples = self.prompts(self.step)
        rollout, metrics = take_step(context, self.optimizer, examples, step=self.step, total_steps=run.max_steps)
        self.schedule.step()
        if self.step == 0:
            self._check_step_zero(metrics)
        if run.log_completions and (self.step == 0 or (self.step + 1) % run.log_completions_every == 0):
            count = min(run.log_completions, len(rollout.texts))
            rows = [updates.completion_row(context, rollout, i) for i in range(count)]
            self.tell(lambda o: o.on_completions(self.step + 1, rows))
        self.step += 1
        for anchor in context.moving.values():
            anchor.after_step(context.policy, self.step)
        self.whole = True
        seconds = max(time.perf_counter() - started, 1e-9)
        tokens = float(rollout.totals.tokens)
        return metrics | {"speed/step_seconds": seconds, "speed/tokens_per_second": tokens / seconds}

    def end_step(self, metrics: dict[str, float], interrupt: Interrupt) -> None:
        """Tell of a step that is done, evaluate and save where that is due; raise if the run ends early."""
        run = self.context.config.run
        self.tell(lambda o: o.on_step(self.step, metrics))
        if self.is_due(run.eval_every):
            self.evaluate()
        if self.is_due(run.save_every):
            self.save()
        if self.step == run.max_steps:
            return
        if finding := self.alarms.watch.stopped_by:
            raise stopped_by(finding, f"step {self.step} of {run.max_steps}")
        if interrupt.asked:
            raise KeyboardInterrupt

    def prompts(self, step: int) -> list[Example]:
        """The prompts of a step: consecutive slices of a fresh order in every epoch."""
        rows, config = self.context.task.train, self.context.config
        size, seed = config.rollout.prompts_per_step, config.run.seed
        return [rows[i] for i in examples_of_step(step, len(rows), size=size, seed=seed)]

    def evaluate(self) -> None:
        """Evaluate every skill now and tell the observers; after the last step with the teacher's answers too."""
        scores, answers = evaluate(self.context)
        if self.step == self.context.config.run.max_steps:
            answers += teacher_answers(self.context)
        self.tell(lambda o: o.on_evaluation(self.step, scores))
        self.tell(lambda o: o.on_answers(self.step, answers))

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps (0: only at the end) is to be done after this one."""
        return self.step == self.context.config.run.max_steps or bool(every and self.step % every == 0)

    def save(self) -> None:
        """Write a checkpoint of the last step done, unless there is one."""
        context, (step, newest) = self.context, self.newest_checkpoint()
        if step == self.step:
            return
        state = {"step": self.step, **context.control.state_dict(), "fingerprints": self.fingerprints}
        documents = {checkpoint.STATE_FILE: state, IDENTITY: identity(context.config, newest)}
        keep = context.config.run.keep_checkpoints
        checkpoint.save(self.folder, self.step, self.weights, documents, keep=keep)

    def save_whole(self) -> tuple[int, Path | None]:
        """Save the last step done, unless an update is under way; returns the newest checkpoint."""
        if self.whole and self.folder.is_dir():
            with suppress(KeyboardInterrupt, RunFolderError):  # impatience or a full disk: an older one is there
                self.save()
        return self.newest_checkpoint()

    def newest_checkpoint(self) -> tuple[int, Path | None]:
        """The step of the newest checkpoint, and its folder; 0 and None without one."""
        saved = checkpoints(self.folder)
        return (number_of(saved[-1]), saved[-1]) if saved else (0, None)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, whose policy is loaded."""
        state = checkpoint.load_state(folder)
        check_same(dict(state.get("fingerprints") or {}), self.fingerprints, instead=checkpoint.new_run(folder))
        checkpoint.load_weights(folder, self.weights)
        with checkpoint.reading(folder):
            go_on_from(self.schedule, state["step"], self.context.config.optim.learning_rate)
            self.context.control.load_state_dict(state)
            self.step = state["step"]

    def tell(self, hook: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            hook(observer)

    def _check_step_zero(self, metrics: Mapping[str, float]) -> None:
        """Warn if the teacher is the policy itself, and the KL to it before the first update is not 0."""
        teacher = self.context.config.teacher
        itself = teacher.kind in OF_THE_POLICY or teacher.teacher_model == self.context.config.model.model
        kl = abs(metrics.get("teacher/kl", 0.0))
        if not itself or teacher.teacher_prompt or not kl > STEP_ZERO_KL:
            return
        text = f"The KL to the teacher before the first update is {kl:.2e} nats per token and should be about 0: it is "
        text += "the same model at the same prompts. Its numbers may be of other tokens or another temperature."
        self.tell(lambda o: o.on_warning(text))

    def stopped(self) -> TrainingStopped:
        """The error for an interrupt, once the state is saved."""
        step, folder = self.save_whole()
        what = f"training was stopped after step {self.step} of {self.context.config.run.max_steps}"
        why = "no step was saved yet" if folder is None else f"the state after step {step} is saved in {folder}"
        fix = f"continue with: klamp train --resume {self.folder}"
        fix = "start it again in another folder, or in this one, with --resume" if folder is None else fix
        return TrainingStopped(what, got="an interrupt", resumable=folder is not None, why=why, fix=fix)

    def info(self, changes: str = "") -> RunInfo:
        """What is known before the first step; `changes`: of a resume, in words."""
        context = self.context
        parameters = sum(p.numel() for p in context.policy.parameters())
        trained = sum(p.numel() for p in context.policy.parameters() if p.requires_grad)
        return RunInfo(
            config=context.config,
            output_dir=self.folder,
            start_step=self.step,
            parameters=parameters - trained if context.config.model.lora_r else parameters,
            trainable_parameters=trained,
            device=str(context.device),
            changes=changes,
        )
