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
from klamp.core.masking import masked_log_ratio, masked_mean, masked_sum, repeated_share, upcast
from klamp.core.objective import Objective, grpo_loss, without_gradient
from klamp.core.penalty import kl_metrics
from klamp.core.term import carries_kl, measure
from klamp.core.types import Batch, Direction
from klamp.doctor.metrics import Counted, averaged_over, check_metrics
from klamp.errors import NonFiniteError
from klamp.hosts.common.anchors import prefix_kl
from klamp.hosts.common.control import check_kl, held_kl
from klamp.hosts.common.step_metrics import StepRecord, repeated_pairs, reward_length_correlation, step_metrics
from klamp.lab.anchors import TeacherScores, of_part
from klamp.lab.config import TrainConfig
from klamp.lab.rollouts import Rollout, batch_of, exact_of
from klamp.lab.setup import Context
from klamp.lab.tasks.base import NO_REWARD
from klamp.scoring.completions import select
from klamp.scoring.scorer import Ask, Scores, TeacherKL, joined, pad_tokens


@dataclass(frozen=True, kw_only=True)
class UpdateOutput:
    """What one update measured."""

    scores: Scores  # the policy's scores of the rollout before the update, detached
    losses: dict[str, float]
    """train/loss, train/policy_loss, train/kl_penalty of the whole step, and what else is measured in the loss."""
    grad_norm: float  # norm of the gradient before clipping
    kl_old: float  # k3 of KL(old||policy) in nats per token; 0 in a rollout's first update
    stopped: bool = False  # whether the optimizer step was left out because that exceeds kl_early_stop


def update(context: Context, optimizer: Optimizer, rollout: Rollout, objective: Objective) -> UpdateOutput:
    """One optimizer step with the gradient of the whole rollout; a NonFiniteError leaves the weights as they were."""
    learns = learning_rows(context, rollout, objective)
    parts, of_each = list[Scores](), dict[str, Tensor]()
    sums: dict[str, Tensor | float] = {"policy/skipped": (~learns).sum() / rollout.totals.sequences}
    optimizer.zero_grad()
    for part in context.parts(len(rollout.texts)):
        ask = _ask(context, rollout, part, objective, learns)
        scores: Scores = context.scorer(select(rollout.completions, part), ask)
        batch = scored_batch(context, rollout, part, scores, objective)
        output = grpo_loss(batch, objective, totals=rollout.totals)
        output.loss.backward()
        parts.append(scores)
        scored = carries_kl(batch, "teacher")  # tokens
        metrics = {"train/loss": output.loss.detach()} | output.metrics
        metrics |= {f"teacher/{name}": masked_mean(value, scored) for name, value in scores.head.items()}
        _add(sums, added_parts(metrics, rollout, part))
        _add(of_each, by_teacher(context, rollout, part, batch, scores))
    scores = joined(parts, rollout.mask.shape[1])
    if scores.exact is not None and context.exact_everywhere:
        sums["kl/exact"] = masked_sum(scores.exact, rollout.kl_mask).double() / rollout.totals.kl_tokens
    losses = {name: float(x) for name, x in sums.items()}
    losses |= {name: float(total) / float(count) for name, (total, count) in of_each.items() if count}
    if (kl := held_kl(losses, exact_everywhere=context.exact_everywhere)) is not None:
        check_kl(kl)  # the controller could not go by it
    kl_old, bound = kl_from_old(rollout, scores.logprobs), context.config.kl.kl_early_stop
    stopped = bound is not None and kl_old > bound
    return UpdateOutput(
        scores=scores,
        losses={"train/kl_penalty": 0.0} | {name: x for name, x in losses.items() if name not in OF_ALL_TOKENS},
        grad_norm=0.0 if stopped else _step(context, optimizer, losses["train/loss"]),
        kl_old=kl_old,
        stopped=stopped,
    )


OF_ALL_TOKENS = ("beta", "kl/k1", "kl/k3", "kl/k3_sequence", "kl/exact")
"""What the loss measures of its parts, and is logged as `step_metrics` and the controller have it."""


def _add(sums: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def learning_rows(context: Context, rollout: Rollout, objective: Objective) -> Tensor:
    """Which completions the update has a gradient in; the others need no backward pass. [B] bool"""
    logprobs = torch.zeros(rollout.mask.shape, device=rollout.mask.device)
    scores = Scores(logprobs=logprobs if rollout.old_logprobs is None else rollout.old_logprobs)
    return ~without_gradient(scored_batch(context, rollout, slice(0, len(rollout.texts)), scores, objective), objective)


def scored_batch(context: Context, rollout: Rollout, part: slice, scores: Scores, objective: Objective) -> Batch:
    """A part of the rollout as the batch that the loss takes."""
    batch, (beta, term) = batch_of(context, rollout, scores.logprobs, part), objective.terms[0]
    if beta > 0 and term.value == "exact":
        forward = scores.exact_forward if term.gradient == "forward" else None
        batch = batch.with_anchor(term.anchor, kl=scores.exact, forward_kl=forward)
    return batch if scores.teacher is None else batch.with_anchor("teacher", kl=scores.teacher)


def _ask(context: Context, rollout: Rollout, part: slice, objective: Objective, learns: Tensor) -> Ask:
    """The request to the scorer for an update: only what is needed and not known yet."""
    beta, term = objective.terms[0]
    in_loss = beta > 0 and term.value == "exact"
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
    # the weight of the tail
    sampler = rollout.completions.sampler_logprobs[part] if teacher.teacher_off_policy != "none" else None
    anchors = [(rows[part], of_part(predictions, rows, part)) for rows, predictions in rollout.teacher_scores.parts]
    return tuple(TeacherKL(rows=rows, anchor=a, how=how, sampler=sampler) for rows, a in anchors if a is not None)


def added_parts(metrics: Mapping[str, Tensor], rollout: Rollout, part: slice) -> dict[str, Tensor]:
    """What each metric of a part adds to that of the step, by its reduction in `METRICS`."""
    totals = rollout.totals
    shares: dict[Counted, float] = {
        "completions": (part.stop - part.start) / float(totals.sequences),
        "tokens": float(rollout.mask[part].sum()) / float(totals.tokens),
        "KL tokens": float(rollout.kl_mask[part].sum()) / float(totals.kl_tokens),
        "parts": 1.0,
    }
    means = {name: x for name, x in metrics.items() if name != "kl/log_ratio_max"}  # which `step_metrics` measures
    return {name: x.double() * shares[averaged_over(name)] for name, x in means.items()}


def rows_of_each(context: Context, rollout: Rollout) -> dict[str, Tensor]:
    """Suffix of a metric's name -> its completions, [B] bool: all of them, and those of each of several teachers."""
    teachers, rows = context.teachers, {"": torch.ones_like(rollout.completions.ended)}
    if teachers is not None and len(teachers.models) > 1:
        rows |= {f".{key}": teachers.rows(key, rollout.examples).to(rows[""].device) for key in teachers.models}
    return rows


def by_teacher(context: Context, rollout: Rollout, part: slice, batch: Batch, scores: Scores) -> dict[str, Tensor]:
    """For each of several teachers: name of a metric -> its sum over the teacher's tokens, and their number."""
    means = dict[str, Tensor]()
    for key, rows in rows_of_each(context, rollout).items():
        if not key:
            continue
        mask, scored = batch.mask & rows[part][:, None], carries_kl(batch, "teacher")
        of_rows = batch.with_anchor("teacher", mask=mask & scored)
        kl = kl_metrics(measure(of_rows, context.objective.terms[1].term))["teacher/kl"]
        sums = {"kl": kl.double() * mask.sum(), "unscored": (mask & ~scored).sum().double()}
        sums |= {name: masked_sum(value, mask).double() for name, value in scores.head.items()}
        means |= {f"teacher/{name}{key}": torch.stack([total, mask.sum().double()]) for name, total in sums.items()}
    return means


def kl_from_old(rollout: Rollout, policy: Tensor) -> float:
    """How far the policy has moved since the rollout: KL(old||policy) as k3, over the whole step."""
    if rollout.old_logprobs is None:
        return 0.0
    delta = masked_log_ratio(rollout.old_logprobs, policy, rollout.mask)
    return float(masked_sum(ESTIMATORS["k3"].value(delta), rollout.mask)) / float(rollout.totals.tokens)


def _step(context: Context, optimizer: Optimizer, loss: float) -> float:
    bound = context.config.optim.max_grad_norm
    parameters = [p for p in context.policy.parameters() if p.requires_grad]
    grad_norm = float(clip_grad_norm_(parameters, bound if bound > 0 else float("inf")))
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        raise NonFiniteError(
            "the loss or its gradient is not finite",
            got=f"loss {loss}, gradient norm {grad_norm}",
            why="an optimizer step with it would destroy the weights",
            fix="look at kl/log_ratio_max and policy/ratio_clipped of the last steps; lower the learning rate, or set "
            "kl_max_log_ratio",
        )
    optimizer.step()
    return grad_norm


def with_old_logprobs(rollout: Rollout, output: UpdateOutput) -> Rollout:
    """The rollout with the log-probabilities of the first update: later updates take their ratios to them."""
    old = output.scores.logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    return replace(rollout, old_logprobs=old, before=None)


CARRIED = ("kl/log_ratio_clamped", "kl/k3_saturated")  # means over the tokens that carry the KL, if any
OF_THE_LAST = (  # how far the updates of a step went from who sampled: before the first of them the ratio is 1
    *("policy/ratio_clipped", "kl/weights_truncated"),
    *("sampler/tokens_cut", "sampler/sequences_cut", "sampler/advantage_cut"),
)


def measured(context: Context, rollout: Rollout, outputs: Sequence[UpdateOutput]) -> dict[str, float]:
    """The metrics of a step: of its tokens before the first update, and of its updates."""
    first, last, size = outputs[0], outputs[-1], context.config.rollout.num_generations
    compared = context.config.task.reward != NO_REWARD
    metrics = step_metrics(step_record(context, rollout, first), group_size=size if compared else 1)
    has_kl = "kl/k3" in metrics
    metrics |= {name: x for name, x in first.losses.items() if has_kl or name not in CARRIED}
    done = [o for o in outputs if not o.stopped]
    metrics["train/grad_norm"] = sum(o.grad_norm for o in done) / max(1, len(done))
    metrics["policy/updates"] = float(len(done))
    if rollout.teacher_scores is not None:
        metrics |= _teacher_metrics(context, rollout, rollout.teacher_scores, first.scores.logprobs)
    if len(outputs) > 1:
        metrics["policy/kl_old"] = last.kl_old
    check_metrics(metrics)
    return metrics | {name: last.losses[name] for name in OF_THE_LAST if name in last.losses}


def _teacher_metrics(context: Context, rollout: Rollout, teacher: TeacherScores, policy: Tensor) -> dict[str, float]:
    """Repeated numbers; mean probability of the end token; correlation in groups of reward and teacher's log-ratio."""
    last = (rollout.completions.mask.sum(-1).clamp(min=1) - 1)[:, None]
    ended = rollout.completions.ended & rollout.mask.gather(1, last)[:, 0]
    end = torch.where(ended, teacher.logprobs.gather(1, last)[:, 0].exp(), 0.0).double()
    likelier = masked_mean(masked_log_ratio(teacher.logprobs, policy, rollout.mask), rollout.mask, -1)
    size, metrics = context.config.rollout.num_generations, dict[str, float]()
    for key, rows in rows_of_each(context, rollout).items():
        repeated = repeated_share(policy[rows], teacher.logprobs[rows], rollout.mask[rows])
        metrics[f"teacher/repeated{key}"] = float(repeated)
        if count := int(ended[rows].sum()):
            metrics[f"teacher/end{key}"] = float(end[rows].sum()) / count
        correlation = reward_length_correlation(rollout.rewards[rows], likelier[rows], size)
        metrics |= {} if correlation is None else {f"teacher/reward_correlation{key}": float(correlation)}
    return metrics


def step_record(context: Context, rollout: Rollout, output: UpdateOutput) -> StepRecord:
    """The tokens of a step, before its first update, as `step_metrics` takes them."""
    completions, scores = rollout.completions, output.scores
    length = context.config.rollout.max_completion_length
    tokens = {
        "mask": rollout.mask,
        "kl_mask": rollout.kl_mask,
        "policy": scores.logprobs,
        "sampler": completions.sampler_logprobs,
        "ref": rollout.ref_logprobs,
        "original": rollout.original_logprobs,
        **{name: getattr(scores, name) for name in ("entropy", "exact", "exact_forward")},
    }
    return StepRecord(
        **{name: None if x is None else pad_tokens(x, length) for name, x in tokens.items()},  # pyright: ignore
        rewards=rollout.rewards,
        ended=completions.ended,
        lengths=completions.mask.sum(-1),
        repeated=repeated_pairs(completions.ids, completions.mask),
        exact_rows=rollout.exact_rows,
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


def completion_row(context: Context, rollout: Rollout, output: UpdateOutput, i: int) -> dict[str, object]:
    """A completion with its tokens and their log-probabilities, as a line of completions.jsonl."""
    mask, tokens = rollout.completions.mask[i], context.tokenizer.convert_ids_to_tokens
    columns = {
        "policy_logprobs": output.scores.logprobs,
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
        """Continue from a saved state; one without masters continues from the weights as they are."""
        super().load_state_dict({name: x for name, x in state_dict.items() if name != MASTERS})
        for master, saved in zip(self.masters, state_dict.get(MASTERS, self.weights), strict=True):
            master.copy_(saved)
        self._round()


def adamw(policy: nn.Module, config: TrainConfig) -> AdamW:
    """AdamW on the weights of a policy that are trained, or on float32 copies of them."""
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
