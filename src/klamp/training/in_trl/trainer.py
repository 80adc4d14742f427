"""TRL's trainer as a run of klamp has it: klamp's KL and advantages, prompts as they stand, a note of every token.

The task is in TRL's convention here: a dataset of prompts in the order in which they come, a reward function. What TRL
generated and computed in a step is put into the form in which klamp's own loop measures one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import trl
from torch import Tensor, arange, cat, isfinite, isin, nn, no_grad, tensor, where, zeros_like
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback

from klamp.core.advantages import group_advantages
from klamp.core.objective import Objective, Weighted, grpo_loss
from klamp.errors import UnsupportedVersion
from klamp.hosts.common.coefficient import GATE_KL, KL_MASK, REFERENCE_LENGTH, TEACHER, loss_mask
from klamp.hosts.common.rollout import LENGTH_COLUMN
from klamp.hosts.trl.grpo_trainer import GRPOTrainer
from klamp.scoring.completions import Completions
from klamp.scoring.scorer import Scores
from klamp.tasks.base import NO_REWARD, Task
from klamp.training.checkpoint import OF_TRL, UNWRITABLE, checkpoints, seal
from klamp.training.config import TrainConfig
from klamp.training.context import Context
from klamp.training.folders import lost
from klamp.training.in_trl.arguments import TEACHER_PROMPT
from klamp.training.optimizer import adamw, go_on, schedule_of
from klamp.training.processes import is_wait_in_vain
from klamp.training.rollouts import Rollout, rewards_of, totals_of
from klamp.training.sampling import examples_of_run
from klamp.training.teachers import Taught, teacher_prompts
from klamp.training.updates import (
    UpdateOutput,
    added_parts,
    batch_of,
    kl_from_old,
    named_losses,
    not_finite,
    over_processes,
)

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE = "example"
"""The column that says which of the task's training prompts a row is."""
SEEN = ("logprobs", "entropy", "teacher")
"""What is kept of each update, by the fields of `Scores`; the last where there is a KL to a teacher at each prefix."""
ROW = "klamp_row"
"""What is added to a generation batch: the number of each row, by which shuffled parts are put together again."""


def dataset_of(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The prompts of all steps as rows, in the order of klamp's own loop, which TRL does not shuffle.

    The text of a prompt is what is tokenized, a chat template already applied.
    """
    from datasets import Dataset  # TRL's own: it is there with TRL

    taught = teacher_prompts(config, task, tokenizer)
    rows = Dataset.from_dict(
        {
            "prompt": [example.prompt for example in task.train],
            EXAMPLE: list(range(len(task.train))),
            LENGTH_COLUMN: [example.reference_length for example in task.train],
            **({TEACHER_PROMPT: [taught[example.prompt] for example in task.train]} if taught else {}),
        }
    )
    return rows.select(examples_of_run(config, len(rows)) or [0])  # TRL wants a row also where no step is taken


def reward_function(context: Context) -> Callable[..., list[float]]:
    """The task's reward as TRL calls it; an error on one process is raised on all of them."""

    def reward(completions: Sequence[str], **columns: Any) -> list[float]:
        examples = [context.task.train[row] for row in columns[EXAMPLE]]
        return rewards_of(context, examples, completions).tolist()

    return reward


@dataclass
class Generated:
    """A rollout of this process as TRL made it, and what its updates saw; B completions of T tokens."""

    rows: list[dict[str, Any]]
    """[B] the rows of the dataset, each repeated for its group."""
    batch: dict[str, Any]
    """TRL's tensors, with klamp's, before they were shuffled and split."""
    lengths: Tensor
    """[B] tokens, end token included, before any masking."""
    rewards: Tensor
    """[B] the task's rewards."""
    advantages: Tensor
    """[B] advantages without any KL."""
    updates: list[list[tuple[Tensor, ...]]] = field(default_factory=list)
    """For each update its parts: row numbers [b], and as `seen` has them [b, T] each."""

    def seen(self, update: int) -> Scores:
        """What an update saw of the policy, in the order of the rows: log-probabilities, entropies, a teacher's KL."""
        rows, *found = (cat(each) for each in zip(*self.updates[update], strict=True))
        kept: dict[str, Any] = {name: each[rows.argsort()] for name, each in zip(SEEN, found, strict=False)}
        return Scores(**kept)


class OwnAdvantages(trl.GRPOTrainer):
    """TRL's trainer with the advantages of klamp's `group_advantages`; klamp's KL comes after them.

    A schedule that was saved goes on by what is asked for now, before klamp's part of the checkpoint is read.
    """

    config: TrainConfig
    cautions: list[str]
    plain_advantages: Tensor

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        size, loss = len(output["advantages"]), self.config.loss
        rewards = self._klamp.rewards.flatten()  # pyright: ignore[reportAttributeAccessIssue]
        every = group_advantages(
            rewards, self.config.rollout.num_generations, scale=loss.scale, baseline=loss.advantage_baseline
        )
        if self.config.task.reward == NO_REWARD:  # the task's own score is measured, and not trained on
            every = zeros_like(every)
        first = self.accelerator.process_index * size
        self.plain_advantages = output["advantages"] = every[first : first + size].to(output["advantages"])
        return output

    def _tokenize_prompts(self, prompts: Any) -> Any:
        _, *others = super()._tokenize_prompts(prompts)
        return self._tokenizer(list(prompts), add_special_tokens=False)["input_ids"], *others

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)  # accelerate's wrapper, with DeepSpeed
        if checkpoint is not None and isinstance(schedule, LambdaLR):
            self.cautions += filter(None, [go_on(schedule, self.config, updates=self.num_iterations)])


class RunTrainer(GRPOTrainer, OwnAdvantages):
    """The trainer of a run: TRL's loop and loss, with klamp's KL, advantages, prompts, optimizer and schedule.

    Args:
        config: of the run.
        stop: the ids that end a completion.
        options: of `klamp.trl.GRPOTrainer`.

    Raises:
        UnsupportedVersion: a TRL that ends completions at one token only, with a model that has several.
    """

    def __init__(self, config: TrainConfig, stop: list[int], **options: Any) -> None:
        self.config, self.stop = config, stop
        self._baseline = config.loss.advantage_baseline
        super().__init__(**options)
        self.generated: Generated | None = None
        self.rows_of_loss: Tensor | None = None
        self.cautions: list[str] = []
        self.remove_callback(PrinterCallback)
        self._klamp.expected_zero = False  # the run looks at step 0 itself
        if len(stop) > 1 and sorted(getattr(self, "eos_token_ids", [])) != sorted(stop):
            raise UnsupportedVersion(
                "this TRL ends completions at the tokenizer's end token only",
                got=f"trl {trl.__version__}, a model with {len(stop)} tokens that end a completion",
                why="the completions would go on where those of klamp's own loop end",
                fix="use a newer trl (1.16.0 was tried), or a model with one end token",
            )

    def _caution(self, text: str) -> None:
        self.cautions.append(text)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """AdamW as in klamp's own loop: on all trained weights alike, with float32 copies of those in 16 bits."""
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            self.optimizer = adamw(trained, self.config)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """The schedule of klamp's own loop: all updates of a step have one rate."""
        if self.lr_scheduler is None:
            of = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = schedule_of(of, self.config, updates=self.num_iterations)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's, which writes in place: what it cannot finish goes; once it is sealed, all but the newest go."""
        folder = Path(str(self.args.output_dir)) / f"{OF_TRL}{self.state.global_step}"
        keep = self.config.run.keep_checkpoints
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # sharded by FSDP2, each process writes a part
            if self.accelerator.is_main_process:
                seal(folder)
                for old in checkpoints(folder.parent.parent, begin=OF_TRL)[:-keep]:
                    rmtree(old)
        except UNWRITABLE as error:
            if is_wait_in_vain(error):
                raise
            rmtree(folder, ignore_errors=True)
            raise lost(folder.parent.parent, error) from error

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        size, device, rewards = len(output["completion_ids"]), output["completion_ids"].device, self._klamp.rewards
        assert rewards is not None
        check_prompts_stand(inputs, output, self._tokenizer)
        first = self.accelerator.process_index * size
        self.generated = Generated(
            rows=list(inputs),
            batch=dict(output),
            lengths=tensor(self._klamp.lengths, device=device),
            rewards=rewards.flatten()[first : first + size],
            advantages=self.plain_advantages,
        )
        return output | {ROW: arange(size, device=device)}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self.rows_of_loss is not None and self.generated is not None:
            logprobs, entropies = (each.detach() for each in result[:2])
            self.generated.updates[-1].append((self.rows_of_loss, logprobs, entropies))
        return result

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        assert self.generated is not None
        updates, parts = self.generated.updates, self.args.gradient_accumulation_steps
        if not updates or len(updates[-1]) == parts:
            updates.append([])
        self.rows_of_loss = inputs[ROW]
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.rows_of_loss = None
        taught = self._klamp.teacher
        if taught is not None and taught.measured is not None:
            updates[-1][-1] += (taught.measured[0],)
        if not bool(isfinite(loss)):
            raise not_finite("the loss is not finite", f"loss {float(loss.detach())}")
        return loss


def check_prompts_stand(rows: Any, output: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make sure that the tokens of the prompts are those that klamp's own loop would write.

    Raises:
        UnsupportedVersion: they are others: TRL reads prompts in another way than it did.
    """
    written = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    for ids, mask, wanted in zip(output["prompt_ids"], output["prompt_mask"], written, strict=True):
        found = ids[mask.bool()].tolist()
        if found != list(wanted):
            raise UnsupportedVersion(
                "TRL writes the prompts with other tokens than klamp",
                got=f"trl {trl.__version__}: {found[:8]}... in the place of {list(wanted)[:8]}...",
                why="the run would train on other prompts than were asked for",
                fix="use a version of TRL that was tried: 1.16.0",
            )


def rollout_of(context: Context, generated: Generated) -> Rollout:
    """The rollout of this process, after at least one update.

    Who sampled is whom vLLM reports; where completions are generated by transformers, which does not tell, the
    log-probabilities of the first update stand in their place, as they do in the loss.
    """
    batch, first = generated.batch, generated.seen(0).logprobs
    ids, mask = batch["completion_ids"], loss_mask(batch)
    whole = arange(ids.shape[1], device=ids.device) < generated.lengths[:, None]
    last = ids.gather(1, (generated.lengths - 1).clamp(min=0)[:, None])[:, 0]
    told = batch.get("sampling_per_token_logps")
    sampler = first if told is None else where(told.isnan(), first, told)
    completions = Completions(
        prompt_ids=batch["prompt_ids"],
        prompt_mask=batch["prompt_mask"],
        ids=ids,
        mask=whole,
        sampler_logprobs=where(whole, sampler, 0.0),
        ended=isin(last, tensor(context.stop, device=ids.device)) & (generated.lengths > 0),
    )
    kl_mask = batch.get(KL_MASK, mask)
    in_reward = context.objective.kl.placement == "reward"
    return Rollout(
        examples=[context.task.train[row[EXAMPLE]] for row in generated.rows],
        texts=completions.texts(context.tokenizer),
        completions=completions,
        mask=mask,
        kl_mask=kl_mask,
        rewards=generated.rewards,
        advantages=batch["advantages"] if in_reward else generated.advantages,
        totals=totals_of(context, mask, kl_mask),
        ref_logprobs=batch.get("ref_per_token_logps"),
        gate_kl=batch.get(GATE_KL),
        reference_length=batch.get(REFERENCE_LENGTH),
        old_logprobs=batch.get("old_per_token_logps"),
        sampler_tells=told is not None,
        taught=Taught(logprobs=batch[TEACHER]) if TEACHER in batch else None,
    )


def update_of(
    context: Context,
    rollout: Rollout,
    seen: Scores,
    *,
    coefficients: tuple[float, float],
    loss: float,
    grad_norm: float,
) -> UpdateOutput:
    """What an update measured.

    Args:
        context: the run.
        rollout: the completions.
        seen: what it saw of the policy before it moved it.
        coefficients: those of the KL to the reference and of that to the teacher in force.
        loss: of the whole step, as TRL has it.
        grad_norm: before clipping.
    """
    beta, taught = coefficients
    others = tuple(Weighted(taught, each.term) for each in context.objective.others)
    parts = loss_parts(context, rollout, seen, replace(context.objective, beta=beta, others=others))
    if beta > 0 and context.objective.kl.value == "exact":
        parts["train/kl_penalty"] = loss - parts["train/policy_loss"] - parts.get("train/teacher_penalty", 0.0)
    return UpdateOutput(
        policy_logprobs=seen.logprobs,
        entropy=seen.entropy,
        losses=parts | {"train/loss": loss},
        grad_norm=grad_norm,
        kl_old=kl_from_old(context, rollout, seen.logprobs),
    )


@no_grad()
def loss_parts(context: Context, rollout: Rollout, seen: Scores, objective: Objective) -> dict[str, float]:
    """klamp's own loss on the tokens of the step: its policy loss, its penalties, and what the gate did.

    TRL tells their sum alone. No penalty where it is made of the exact KL of every token, of which TRL's loop keeps the
    mean only.
    """
    objective = replace(objective, beta=0.0) if objective.kl.value == "exact" else objective
    every = slice(0, len(rollout.texts))
    output = grpo_loss(batch_of(context, rollout, every, seen, objective), objective, totals=rollout.totals)
    measured = {name: value.double() for name, value in (output.metrics | {"train/loss": output.loss}).items()}
    return named_losses(over_processes(context, added_parts(measured, rollout, every)))
