"""klamp's own loop, from the KL of a token to a whole run.

    compute_kl_divergence   the KL of each token
    compute_loss            clipped policy loss plus KL
    grpo_microbatch_step    forward and backward pass of one micro-batch
    take_step               a step: sample, score, update, measure, adjust beta
    train                   steps for a model and a reward function
    log_train               a line and TensorBoard scalars per step
    Trainer                 a configured run: schedule, evaluation, checkpoints, alarms, resume

All but `take_step` and `Trainer` are the functions of a guide from scratch (docs/sources.md). Its loss, differentiated
as printed, has an expected gradient of zero: the value here is the printed one, the gradient that of KL(policy || ref).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.kl import check_beta
from klamp.config.teacher import OF_THE_POLICY
from klamp.core.arguments import FLOATS, MASKS, check_instance, check_tensors
from klamp.core.gradients import kl_penalty
from klamp.core.masking import Totals, masked_mean
from klamp.core.objective import grpo_loss
from klamp.core.types import Batch, LogProbs, Mask, TokenValues
from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.hosts.common.anchors import STEP_ZERO_KL, check_apart
from klamp.hosts.common.control import go_on_from, held_kl
from klamp.lab import checkpoint, updates
from klamp.lab.anchors import LocalReference, check_tokens_of
from klamp.lab.checkpoint import check_resume, identity
from klamp.lab.config import OptimConfig, RolloutConfig, RunConfig, TrainConfig
from klamp.lab.evaluation import check_same, evaluate, fingerprints, teacher_answers
from klamp.lab.folders import checkpoints, lines_of, number_of, opened_folder, scores_of, step_of
from klamp.lab.interrupts import Interrupt, deferred_interrupts
from klamp.lab.observers import AlarmObserver, Observer, RunInfo, RunLog, RunSummary, check_trackers, stopped_by
from klamp.lab.rollouts import Rollout, collect, measure_reference_length
from klamp.lab.sampling import examples_of_step
from klamp.lab.setup import Context, build, check_processes
from klamp.lab.tasks.base import Example, Task, checked
from klamp.lab.tasks.files import chat_cautions
from klamp.names import IDENTITY, METRICS_FILE
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
    prefix; not that of the formula itself, which is zero in expectation.
    Shapes: [B, T], [B, T] -> [B, T].

    Raises:
        TensorError: no tensors of log-probabilities.
        ShapeError: the two differ in shape.

    Source: the from-scratch guide (docs/sources.md); docs/estimators
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
    kl: KLConfig | None = None,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss plus KL penalty, averaged over the response tokens.

    Equation: mean_t(-min(r A, clip(r) A)) + kl_coef * mean_t KL_t.

    Value: with the defaults exactly as the from-scratch guide prints it.
    Gradient: PPO's plus kl_coef times that of KL(policy || ref) at each prefix.
    Shapes: [B, T] each, advantages [B] or [B, T] -> scalar and a dictionary of detached scalars.

    Args:
        old_log_probs: under the policy at rollout time; None: the policy itself.
        ref_log_probs: under the reference; needed where kl_coef > 0.
        kl: any other KL term; its beta replaces kl_coef.
        totals: size of the whole batch when this is a micro-batch of it.

    Returns:
        The loss and metadata: `kl_penalty_mean` (what the KL adds to the loss), `kl_mean` (mean k1 in nats per
        token), `policy_loss`, `clip_fraction`, `log_prob_mean`.

    Raises:
        ConfigError: kl_coef > 0 without ref_log_probs, both kl_coef and kl, or a number that is none.
        TensorError, ShapeError, EmptyMaskError, NonFiniteError: tensors that cannot be used.

    Source: the from-scratch guide (docs/sources.md)
    """
    check_beta(kl_coef, name="kl_coef")
    check_tensors(MASKS, response_mask=response_mask)
    if kl is not None:
        check_instance("kl", kl, KLConfig)
    if kl is not None and kl_coef:
        raise ConfigError(
            "kl_coef and kl are both given",
            got=f"kl_coef={kl_coef}, kl with beta={kl.beta}",
            why="both say how much of the KL enters",
            fix="set kl's beta, and leave kl_coef out",
        )
    objective = build_objective(kl or printed_kl(kl_coef), printed_loss(cliprange), max_length=1)
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
    """A mean over all tokens; `group_advantages` as they are: less the group's mean, over its deviation."""
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
        model: the policy; or its `Scorer`, which `Trainer` uses: the same numbers, for less memory and time.
        temperature: that of the sampler.
        totals: size of the whole batch; with it, micro-batches add up exactly to the batch.

    Returns:
        The detached loss and the metadata of `compute_loss`.

    Raises:
        ConfigError: kl_coef > 0 without a reference.
    """
    check_beta(kl_coef, name="kl_coef")
    ref_log_probs = None
    if kl_coef > 0:
        with torch.no_grad():
            ref_log_probs = _log_probs(needed_reference(ref_model, kl_coef, model), completions, temperature)
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


def needed_reference(ref_model: nn.Module | None, kl_coef: float, policy: nn.Module) -> nn.Module:
    """The reference; a ConfigError if there is none, a ModelError if it has weights of the policy."""
    if ref_model is None:
        raise ConfigError(
            "kl_coef is positive and there is no reference",
            got=f"kl_coef={kl_coef}, ref_model=None",
            why="a KL needs something to be the distance to",
            fix="pass ref_model (a frozen copy of the starting policy), or kl_coef=0",
        )
    check_apart(*(x.model if isinstance(x, Scorer) else x for x in (ref_model, policy)))
    return ref_model


def _log_probs(model: nn.Module, completions: Completions, temperature: float) -> LogProbs:
    if isinstance(model, Scorer):
        return model(completions, Ask(temperature=temperature)).logprobs
    return score(model, completions, temperature=temperature).logprobs


class StepOutput(NamedTuple):
    """What one step of GRPO gave."""

    rollout: Rollout  # the completions that were trained on
    first: updates.UpdateOutput  # what its first update measured
    metrics: dict[str, float]  # name -> value, names as in `klamp.doctor.metrics`


def take_step(
    context: Context, optimizer: Optimizer, examples: Sequence[Example], *, step: int, total_steps: int
) -> StepOutput:
    """One step of GRPO: sample and score completions, update the policy, measure, adjust beta.

    `step` counts from 0, and with the seed it determines every draw. After a RewardError the weights are as they were.
    """
    config, rate = context.config, float(optimizer.param_groups[0]["lr"])
    beta, coefficient = context.control.beta(step, total_steps), config.teacher.coefficient(step, total_steps)
    objective = context.objective.weighted(beta, teacher=coefficient)
    rollout = collect(context, examples, step=step, terms=objective.terms)
    outputs: list[updates.UpdateOutput] = []
    for _ in range(config.optim.num_iterations):
        outputs.append(updates.update(context, optimizer, rollout, objective))
        if outputs[-1].stopped:
            break
        rollout = updates.with_old_logprobs(rollout, outputs[0])
    metrics = updates.measured(context, rollout, outputs) | {"train/learning_rate": rate}
    metrics |= updates.control_metrics(context, beta, metrics)
    metrics |= {"teacher/coef": coefficient} if len(objective.terms) > 1 else {}
    if (kl := held_kl(metrics, exact_everywhere=context.exact_everywhere)) is not None:
        context.control.update(kl, metrics, rollout.rewards.view(-1, config.rollout.num_generations))
    return StepOutput(rollout, outputs[0], metrics)


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
    the policy. `klamp doctor` reads the TensorBoard folder as fully as that of `klamp train`.

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
    frozen = needed_reference(ref_model, kl_coef, model) if kl_coef > 0 else None
    if frozen is not None and (name := getattr(getattr(frozen, "config", None), "_name_or_path", "")):
        check_tokens_of(name, tokenizer, who="reference")
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
        output = take_step(context, optimizer, chosen, step=step, total_steps=steps)
        metrics = {name.removeprefix("train/"): value for name, value in output.metrics.items()}
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
    names = {"loss": "Loss", "grad_norm": "Grad norm", "reward": "Reward", "kl_penalty": "KL penalty"}
    rounded = {name: round(metrics[name], 4) + 0.0 for name in names if name in metrics}  # -0.0000 says nothing
    shown = [f"{names[name]}: {value:.4f}" for name, value in rounded.items()]
    line = " | ".join([f"Step {step}", *shown])
    log.info(line)
    return line


class Trainer:
    """A run of a configuration: how far it is, what it measured last, and the observers that are told of it."""

    def __init__(self, context: Context, observers: Sequence[Observer], folder: Path = Path()) -> None:
        config = context.config
        self.context, self.folder, self.step = context, folder, 0
        self.optimizer = updates.adamw(context.policy, config)
        self.optimizer.register_step_pre_hook(self._begin_update)
        self.schedule = updates.schedule_of(self.optimizer, config)
        self.alarms = AlarmObserver(self.tell, rl_skill=context.task.rl_skill, stop_on=config.run.stop_on)
        self.observers = [*observers, self.alarms]
        self.saved: tuple[int, Path | None] = (0, None)
        self.before, self.after, self.metrics = (dict[str, float]() for _ in range(3))
        self.whole = True  # whether the weights are those of the last step done, and not half way through the next one
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
                _, changes = check_resume(config, folder) or (0, "")
                run = cls(build(config, observers, resumed=saved), everyone, folder)
                if saved is not None:
                    run.resume(saved)
                run.tell(lambda o: o.on_start(run.info(changes)))
                run.warn(*chat_cautions(config.task, run.context.tokenizer, run.context.stop))
                return run.run()
            finally:
                for observer in everyone:
                    observer.close()

    def run(self) -> RunSummary:
        """Take all steps that are left; if the run ends early, the state is saved."""
        started = time.perf_counter()
        measure_reference_length(self.context)
        if not self.before or (self.is_due(self.context.config.run.eval_every) and not self.after):
            self.after = self.evaluate()
            self.before = self.before or self.after
        with deferred_interrupts() as interrupt:
            try:
                while self.step < self.context.config.run.max_steps:
                    self.end_step(self.train_step(), interrupt)
            except (KeyboardInterrupt, KlampError) as error:
                step, folder = self.last_checkpoint()
                saved = f"the state after step {step} is saved in {folder}"
                saved = "no step was saved yet" if folder is None else saved
                if isinstance(error, KeyboardInterrupt):
                    raise self.stopped(saved, resumable=folder is not None) from error
                if folder is not None:
                    error.add_note(f"  {saved}")
                raise
        summary = RunSummary(
            output_dir=self.folder,
            steps=self.step,
            seconds=time.perf_counter() - started,
            rl_skill=self.context.task.rl_skill,
            before=self.before,
            after=self.after,
            final_metrics=self.metrics,
        )
        self.tell(lambda o: o.on_end(summary))
        return summary

    def train_step(self) -> dict[str, float]:
        """Take the next step; returns its metrics."""
        started, context, run = time.perf_counter(), self.context, self.context.config.run
        examples = self.prompts(self.step)
        step = take_step(context, self.optimizer, examples, step=self.step, total_steps=run.max_steps)
        self.schedule.step()
        if self.step == 0:
            self._check_step_zero(step.metrics)
        if run.log_completions and (self.step == 0 or (self.step + 1) % run.log_completions_every == 0):
            count = min(run.log_completions, len(step.rollout.texts))
            rows = [updates.completion_row(context, step.rollout, step.first, i) for i in range(count)]
            self.tell(lambda o: o.on_completions(self.step + 1, rows))
        self.step += 1
        for anchor in context.moving.values():
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
        if finding := self.alarms.watch.stopped_by:
            raise stopped_by(finding, f"step {self.step} of {run.max_steps}")
        if interrupt.asked:
            raise KeyboardInterrupt

    def prompts(self, step: int) -> list[Example]:
        """The prompts of a step: consecutive slices of a fresh order in every epoch."""
        rows, config = self.context.task.train, self.context.config
        size, seed = config.rollout.prompts_per_step, config.run.seed
        return [rows[i] for i in examples_of_step(step, len(rows), size=size, seed=seed)]

    def evaluate(self) -> dict[str, float]:
        """Evaluate every skill now and tell the observers; after the last step with the teacher's answers too."""
        scores, answers = evaluate(self.context)
        if self.step == self.context.config.run.max_steps:
            answers += teacher_answers(self.context)
        self.tell(lambda o: o.on_evaluation(self.step, scores))
        self.tell(lambda o: o.on_answers(self.step, answers))
        return scores

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps (0: only at the end) is to be done after this one."""
        return self.step == self.context.config.run.max_steps or bool(every and self.step % every == 0)

    def save(self) -> Path | None:
        """Write a checkpoint of the last step done, unless this run has saved that step before."""
        if self.saved[0] != self.step:
            context = self.context
            self.identity = self.identity or identity(context.config)
            state = {
                "step": self.step,
                **context.control.state_dict(),
                "fingerprints": self.fingerprints,
                "schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
            }
            folder = checkpoint.save(
                self.folder,
                self.step,
                policy=context.policy,
                tokenizer=context.tokenizer,
                optimizer=self.optimizer,
                anchors={name: anchor.average for name, anchor in context.moving.items()},
                documents={checkpoint.STATE_FILE: state, IDENTITY: self.identity},
                keep=context.config.run.keep_checkpoints,
            )
            self.saved = (self.step, folder)
            self.tell(lambda o: o.on_checkpoint(self.step, folder))
        return self.saved[1]

    def last_checkpoint(self) -> tuple[int, Path | None]:
        """The step to continue from and its folder: the last one done, or in mid-update the newest on disk."""
        if self.whole and self.folder.is_dir():
            with suppress(KeyboardInterrupt, RunFolderError):  # impatience or a full disk: an older one is there
                return self.step, self.save()
        saved = checkpoints(self.folder)
        return (number_of(saved[-1]), saved[-1]) if saved else (0, None)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, whose policy is loaded, and from what metrics.jsonl says of the steps done."""
        state = checkpoint.load_state(folder)
        check_same(dict(state.get("fingerprints") or {}), self.fingerprints, checkpoint=folder)
        self.identity = identity(self.context.config, folder)
        anchors = {name: anchor.average for name, anchor in self.context.moving.items()}
        checkpoint.load_weights(folder, self.optimizer, anchors)
        with checkpoint.reading(folder):
            self.schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None]})  # the function is not saved
            if repr(self.schedule.last_epoch) != repr(state["step"]):
                raise TypeError(f"last_epoch of the schedule is {self.schedule.last_epoch!r}")
            go_on_from(self.schedule, state["step"], self.context.config.optim.learning_rate)
            self.context.control.load_state_dict(state)
            self.step = state["step"]
        self.saved = (self.step, folder)
        rows = [row for row in lines_of(self.folder / METRICS_FILE) if step_of(row) <= self.step]
        evaluated, steps = [row for row in rows if scores_of(row)], [row for row in rows if "reward" in row]
        self.before = scores_of(evaluated[0]) if evaluated else {}
        self.metrics = {name: x for name, x in steps[-1].items() if name != "step"} if steps else {}
        self.after = scores_of(evaluated[-1]) if evaluated and evaluated[-1]["step"] == self.step else {}

    def tell(self, hook: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            hook(observer)

    def warn(self, *texts: str) -> None:
        for text in texts:
            self.tell(lambda o, text=text: o.on_warning(text))

    def _check_step_zero(self, metrics: Mapping[str, float]) -> None:
        """Warn if the teacher is the policy itself, and the KL to it before the first update is not 0."""
        teacher = self.context.config.teacher
        itself = teacher.kind in OF_THE_POLICY or teacher.teacher_model == self.context.config.model.model
        kl = abs(metrics.get("teacher/kl", 0.0))
        if itself and not teacher.teacher_prompt and kl > STEP_ZERO_KL:
            self.warn(
                f"The KL to the teacher before the first update is {metrics['teacher/kl']:.2e} nats per token and "
                "should be about 0: it is the same model at the same prompts. Its numbers likely belong to other "
                "tokens, or to another temperature."
            )

    def stopped(self, saved: str, *, resumable: bool) -> TrainingStopped:
        what = f"training was stopped after step {self.step} of {self.context.config.run.max_steps}"
        fix = f"continue with: klamp train --resume {self.folder}"
        fix = fix if resumable else "start it again in another folder, or in this one, with --resume"
        return TrainingStopped(what, got="an interrupt", resumable=resumable, why=saved, fix=fix)

    def info(self, changes: str = "") -> RunInfo:
        """What is known before the first step; `changes` are those of a resume, in words."""
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
