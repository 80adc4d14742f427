"""One update of the policy: gradients of micro-batches that add up exactly, one optimizer step; what is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from klamp.config.loss import configured_price, spread_of_group
from klamp.core.estimators import ESTIMATORS
from klamp.core.masking import masked_log_ratio, masked_mean, repeated_share, upcast
from klamp.core.objective import Objective, grpo_loss, without_gradient
from klamp.core.penalty import kl_metrics
from klamp.core.surrogates import effective_sample_size
from klamp.core.term import measure
from klamp.core.types import Batch, Direction
from klamp.doctor.metrics import check_metrics
from klamp.errors import NonFiniteError
from klamp.hosts.common.anchors import prefix_kl
from klamp.hosts.common.control import check_kl, held_kl
from klamp.hosts.common.step_metrics import StepRecord, repeated_pairs, reward_length_correlation, step_metrics
from klamp.lab.anchors import TeacherScores
from klamp.lab.config import TrainConfig
from klamp.lab.rollouts import Rollout, batch_of, exact_of
from klamp.lab.setup import Context
from klamp.lab.tasks.base import NO_REWARD
from klamp.scoring.completions import select
from klamp.scoring.scorer import Ask, Scores, TeacherKL, joined


@dataclass(frozen=True, kw_only=True)
class UpdateOutput:
    """What one update measured."""

    scores: Scores  # the policy's scores of the rollout before the update, detached
    losses: dict[str, float]  # the loss and its metrics over the whole step
    grad_norm: float | None  # before clipping; None: the KL to the old policy exceeds kl_early_stop, no step was taken


def update(context: Context, optimizer: Optimizer, rollout: Rollout, objective: Objective) -> UpdateOutput:
    """One optimizer step with the gradient of the whole rollout; a NonFiniteError leaves the weights as they were."""
    learns = learning_rows(context, rollout, objective)
    parts, part_losses = list[Scores](), list[Tensor]()
    optimizer.zero_grad()
    for part in context.parts(len(rollout.texts)):
        ask = _ask(context, rollout, part, objective, learns)
        scores: Scores = context.scorer(select(rollout.completions, part), ask)
        loss = grpo_loss(scored_batch(context, rollout, scores, objective, part), objective, totals=rollout.totals).loss
        loss.backward()
        part_losses.append(loss.detach().double())
        parts.append(scores)
    scores = joined(parts, rollout.mask.shape[1])
    losses = {"train/loss": float(sum(part_losses)), **loss_metrics(context, rollout, scores, objective)}
    losses["policy/skipped"] = float((~learns).sum() / rollout.totals.sequences)
    if (kl := held_kl(losses, exact_everywhere=context.exact_everywhere)) is not None:
        check_kl(kl)  # the controller could not go by it
    bound = context.config.kl.kl_early_stop
    stops = bound is not None and losses.get("policy/kl_old", 0.0) > bound
    grad_norm = None if stops else _step(context, optimizer, losses["train/loss"])
    return UpdateOutput(scores=scores, losses=losses, grad_norm=grad_norm)


def learning_rows(context: Context, rollout: Rollout, objective: Objective) -> Tensor:
    """Which completions the update has a gradient in; the others need no backward pass. [B] bool"""
    logprobs = rollout.old_logprobs
    logprobs = torch.zeros(rollout.mask.shape, device=rollout.mask.device) if logprobs is None else logprobs
    return ~without_gradient(scored_batch(context, rollout, Scores(logprobs=logprobs), objective), objective)


def scored_batch(
    context: Context, rollout: Rollout, scores: Scores, objective: Objective, part: slice = slice(None)
) -> Batch:
    """A part of the rollout as the batch that the loss takes."""
    batch, (beta, term) = batch_of(context, rollout, scores.logprobs, part), objective.terms[0]
    if beta != 0 and "exact" in (term.value, term.baseline):
        forward = scores.exact_forward if term.gradient == "forward" else None
        batch = batch.with_anchor(term.anchor, kl=scores.exact, forward_kl=forward)
    return batch if scores.teacher is None else batch.with_anchor("teacher", kl=scores.teacher)


def _ask(context: Context, rollout: Rollout, part: slice, objective: Objective, learns: Tensor) -> Ask:
    """The request to the scorer for an update: only what is needed and not known yet."""
    beta, term = objective.terms[0]
    in_loss = beta != 0 and term.value == "exact"
    direction: Direction = "forward" if term.gradient == "forward" else "reverse"
    return Ask(
        temperature=context.config.rollout.temperature,
        entropy=True,
        exact=exact_of(context, rollout, part, learns=(direction,) if in_loss else ()),
        taught=taught_of(context, rollout, part),
        learns=None if bool(learns[part].all()) else learns[part],
        known=None if rollout.before is None else rollout.before.rows(part),
    )


def taught_of(context: Context, rollout: Rollout, part: slice) -> tuple[TeacherKL, ...]:
    """What a scorer needs to measure the KL to the teachers of a part of the rollout at each prefix."""
    teacher = context.config.teacher
    if rollout.teacher_scores is None or (how := prefix_kl(teacher)) is None:
        return ()
    weighs = teacher.teacher_off_policy != "none"  # the tail
    sampler = rollout.completions.sampler_logprobs[part] if weighs else None
    parts = (predictions.part(part) for predictions in rollout.teacher_scores.parts)
    return tuple(TeacherKL(rows=p.rows, anchor=p.predictions, how=how, sampler=sampler) for p in parts if p is not None)


@torch.no_grad()
def loss_metrics(context: Context, rollout: Rollout, scores: Scores, objective: Objective) -> dict[str, float]:
    """The metrics of the loss over the whole step, however it was divided."""
    batch = scored_batch(context, rollout, scores, objective)
    metrics: dict[str, Tensor | float] = {"train/kl_penalty": 0.0}
    metrics |= grpo_loss(batch, objective, totals=rollout.totals).metrics
    metrics |= effective_sample_size(scores.logprobs, rollout.completions.sampler_logprobs, rollout.mask)
    if scores.exact is not None and context.exact_everywhere:
        metrics["kl/exact"] = masked_mean(scores.exact, rollout.kl_mask)
    if rollout.old_logprobs is not None:
        moved = masked_log_ratio(rollout.old_logprobs, scores.logprobs, rollout.mask)
        metrics["policy/kl_old"] = masked_mean(ESTIMATORS["k3"].value(moved), rollout.mask)
    if rollout.teacher_scores is not None:
        metrics |= _teacher_metrics(context, rollout, rollout.teacher_scores, scores, batch)
    return {name: float(value) for name, value in metrics.items()}


def _teacher_metrics(
    context: Context, rollout: Rollout, teacher: TeacherScores, scores: Scores, batch: Batch
) -> dict[str, Tensor]:
    """Head, end token, agreement with the reward; the KL to each of several teachers."""
    policy, numbers = batch.policy_logprobs, teacher.logprobs
    metrics = {f"teacher/{name}": masked_mean(value, batch.mask) for name, value in scores.head.items()}
    metrics["teacher/repeated"] = repeated_share(policy, numbers, batch.mask)
    last = (rollout.completions.mask.sum(-1).clamp(min=1) - 1)[:, None]
    ended = rollout.completions.ended & rollout.mask.gather(1, last)[:, 0]
    if bool(ended.any()):
        metrics["teacher/end"] = masked_mean(numbers.gather(1, last)[:, 0].exp(), ended)
    likelier = masked_mean(masked_log_ratio(numbers, policy, batch.mask), batch.mask, -1)
    size = context.config.rollout.num_generations
    if (correlation := reward_length_correlation(rollout.rewards, likelier, size)) is not None:
        metrics["teacher/reward_correlation"] = correlation
    for key, rows in teacher.rows.items() if len(teacher.rows) > 1 else ():
        mask = batch.mask & rows[:, None]
        of_rows = measure(batch.with_anchor("teacher", mask=mask), context.objective.terms[1].term)
        if bool(mask.any()):
            metrics[f"teacher/kl.{key}"] = kl_metrics(of_rows)["teacher/kl"]
            metrics[f"teacher/repeated.{key}"] = repeated_share(policy, numbers, mask)
    return metrics


def _step(context: Context, optimizer: Optimizer, loss: float) -> float:
    bound = context.config.optim.max_grad_norm
    parameters = [p for p in context.policy.parameters() if p.requires_grad]
    grad_norm = float(clip_grad_norm_(parameters, bound if bound > 0 else float("inf")))
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        got, why = f"loss {loss}, gradient norm {grad_norm}", "an optimizer step with it would destroy the weights"
        fix = "look at kl/log_ratio_max and policy/ratio_clipped of the last steps; lower the learning rate, or set "
        fix += "kl_max_log_ratio"
        raise NonFiniteError("the loss or its gradient is not finite", got=got, why=why, fix=fix)
    optimizer.step()
    return grad_norm


def with_old_logprobs(rollout: Rollout, output: UpdateOutput) -> Rollout:
    """The rollout with the log-probabilities of the first update: later updates take their ratios to them."""
    old = output.scores.logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    return replace(rollout, old_logprobs=old, before=None)


OF_KL_TOKENS = ("k1", "k3", "k3_sequence", "exact", "log_ratio_max", "log_ratio_clamped", "k3_saturated")
"""Metrics `kl/NAME` over the tokens that carry the KL to the reference, if any do."""
OF_THE_LAST = (  # how far a step's updates moved the policy from the sampler: before the first one the ratio is 1
    *("policy/ratio_clipped", "policy/kl_old", "kl/weights_truncated"),
    *("sampler/kl", "sampler/ess", "sampler/ess_sequence"),
    *("sampler/tokens_cut", "sampler/sequences_cut", "sampler/advantage_cut"),
)


def measured(context: Context, rollout: Rollout, outputs: Sequence[UpdateOutput]) -> dict[str, float]:
    """The metrics of a step: of its tokens before the first update, and of its updates."""
    first, last, size = outputs[0], outputs[-1], context.config.rollout.num_generations
    compared = context.config.task.reward != NO_REWARD
    metrics = step_metrics(step_record(rollout, first.scores), group_size=size if compared else 1)
    left_out = () if "kl/k3" in metrics else OF_KL_TOKENS
    metrics = {name: x for name, x in first.losses.items() if name.removeprefix("kl/") not in left_out} | metrics
    norms = [output.grad_norm for output in outputs if output.grad_norm is not None]
    metrics["train/grad_norm"] = sum(norms) / max(1, len(norms))
    metrics["policy/updates"] = float(len(norms))
    check_metrics(metrics)
    metrics |= {name: last.losses[name] for name in OF_THE_LAST if name in last.losses}
    return metrics if len(outputs) > 1 else {name: x for name, x in metrics.items() if name != "policy/kl_old"}


def step_record(rollout: Rollout, scores: Scores) -> StepRecord:
    """The tokens of a step as `step_metrics` takes them, scored by the policy before its first update."""
    completions = rollout.completions
    return StepRecord(
        mask=rollout.mask,
        kl_mask=rollout.kl_mask,
        policy=scores.logprobs,
        sampler=completions.sampler_logprobs,
        ref=rollout.ref_logprobs,
        original=rollout.original_logprobs,
        entropy=scores.entropy,
        exact=scores.exact,
        exact_forward=scores.exact_forward,
        exact_rows=None if rollout.ref_predictions is None else rollout.ref_predictions.rows,
        rewards=rollout.rewards,
        ended=completions.ended,
        lengths=completions.mask.sum(-1),
        repeated=repeated_pairs(completions.ids, completions.mask),
    )


def control_metrics(context: Context, beta: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """beta, its price, and what the controller logs; no price without a reward, or if the sampler is the reference."""
    config = context.config
    if config.task.reward == NO_REWARD or config.kl.reference == "sampler":
        return {"beta": beta}
    price = configured_price(
        config.kl,
        config.loss,
        group_size=config.rollout.num_generations,
        mean_length=metrics["length/mean"],
        max_length=config.rollout.max_completion_length,
        beta=beta,
    )
    return context.control.metrics(price, spread_of_group(metrics["reward_std"], metrics["groups/saturated"]))


def completion_row(context: Context, rollout: Rollout, i: int) -> dict[str, object]:
    """A completion of a step that is done, with its tokens' log-probabilities, as a line of completions.jsonl."""
    mask, tokens = rollout.completions.mask[i], context.tokenizer.convert_ids_to_tokens
    columns = {
        "policy_logprobs": rollout.old_logprobs,
        "sampler_logprobs": rollout.completions.sampler_logprobs,
        "ref_logprobs": rollout.ref_logprobs,
        "teacher_logprobs": None if rollout.teacher_scores is None else rollout.teacher_scores.logprobs,
        "trained": None if torch.equal(rollout.mask[i], mask) else rollout.mask,
    }
    return {
        "prompt": rollout.examples[i].prompt,
        "completion": rollout.texts[i],
        "answer": rollout.examples[i].answer,
        "reward": float(rollout.rewards[i]),
        "advantage": float(rollout.advantages[i]),
        "tokens": tokens(rollout.completions.ids[i][mask].tolist()),
        "ended": bool(rollout.completions.ended[i]),
        **{name: x[i][mask].tolist() for name, x in columns.items() if x is not None},
    }


MASTERS = "masters"  # the key of the masters in the optimizer's saved state


class MasterAdamW(AdamW):
    """AdamW on float32 copies of the weights, the masters; after every step the weights are the copies, rounded.

    At a rate of 1e-6 a step is far below the last bit of a bfloat16 weight: most weights would never move.
    """

    def __init__(self, weights: Iterable[Tensor], **options: Any) -> None:
        self.weights = list(weights)
        self.masters = [upcast(weight.detach()) for weight in self.weights]
        super().__init__(self.masters, **options)
        self.register_step_pre_hook(lambda *_: self._take_gradients())
        self.register_step_post_hook(lambda *_: self._round())

    def _take_gradients(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else upcast(weight.grad)

    @torch.no_grad()
    def _round(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:  # the masters hold theirs during a step only
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), MASTERS: self.masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; a state without masters continues from the weights."""
        super().load_state_dict({name: x for name, x in state_dict.items() if name != MASTERS})
        for master, saved in zip(self.masters, state_dict.get(MASTERS, self.weights), strict=True):
            master.copy_(saved)
        self._round()


def adamw(policy: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW on a policy's trained weights, or on float32 copies."""
    weights = [p for p in policy.parameters() if p.requires_grad]
    copies = config.model.master_weights == "float32" and any(p.dtype == torch.bfloat16 for p in weights)
    return (MasterAdamW if copies else AdamW)(
        weights,
        lr=config.optim.learning_rate,
        betas=(config.optim.adam_beta1, config.optim.adam_beta2),
        weight_decay=config.optim.weight_decay,
        fused=all(p.device.type in ("cpu", "cuda") for p in weights),  # one pass over the weights and moments
    )


def schedule_of(optimizer: Optimizer, config: TrainConfig) -> LambdaLR:
    """The schedule of the learning rate over the steps of a run; all updates of a step have one rate."""
    optim, steps = config.optim, config.run.max_steps
    name = "constant_with_warmup" if optim.lr_scheduler_type == "constant" else optim.lr_scheduler_type
    warmup = min(optim.warmup_steps, steps)
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)  # pyright: ignore
