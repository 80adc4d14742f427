"""One update of the policy: gradients of micro-batches that add up exactly, one optimizer step; what is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from klamp.config.loss import configured_price, spread_of_group
from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_mean, masked_sum
from klamp.core.objective import Objective, grpo_loss, without_gradient
from klamp.core.penalty import kl_metrics
from klamp.core.term import carries_kl
from klamp.core.types import Batch, Direction
from klamp.diagnostics.metrics import Counted, averaged_over
from klamp.errors import NonFiniteError
from klamp.hosts.common.control import check_kl, held_kl
from klamp.hosts.common.step_metrics import (
    StepRecord,
    repeated_pairs,
    reward_length_correlation,
    step_metrics,
)
from klamp.scoring.completions import select
from klamp.scoring.scorer import Ask, Scores, TeacherKL, joined, pad_tokens
from klamp.tasks.base import NO_REWARD
from klamp.training.context import Context
from klamp.training.rollouts import Rollout, exact_of
from klamp.training.teachers import Taught


@dataclass(frozen=True, kw_only=True)
class UpdateOutput:
    """What one update measured."""

    policy_logprobs: Tensor
    """[B, T] log-probabilities of the policy before the update."""
    entropy: Tensor | None
    """[B, T] entropy of the policy."""
    exact: Tensor | None
    """[B, T] exact KL(policy||ref) in nats; None where it is not measured."""
    exact_forward: Tensor | None
    """[B, T] exact KL(ref||policy) in nats."""
    losses: dict[str, float]
    """train/loss, train/policy_loss, train/kl_penalty of the whole step, and the gate's metrics."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    kl_old: float
    """k3 of KL(old||policy) in nats per token; 0 in a rollout's first update."""
    stopped: bool = False
    """Whether the optimizer step was left out because that exceeds kl_early_stop."""


def batch_of(context: Context, rollout: Rollout, part: slice, scores: Scores, objective: Objective) -> Batch:
    """A part of the rollout as the batch that the loss takes."""
    length = scores.logprobs.shape[1]

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[part, :length] if x.ndim == 2 else x[part]

    in_loss = objective.beta > 0 and objective.kl.value == "exact"
    return Batch(
        policy_logprobs=scores.logprobs,
        mask=rollout.mask[part, :length],
        kl_mask=rollout.kl_mask[part, :length] if context.config.kl.excludes else None,
        advantages=rollout.advantages[part],
        old_logprobs=cut(rollout.old_logprobs),
        ref_logprobs=cut(rollout.ref_logprobs),
        sampler_logprobs=rollout.completions.sampler_logprobs[part, :length],
        exact_kl=scores.exact if in_loss else None,
        exact_kl_forward=scores.exact_forward if in_loss and objective.kl.gradient == "forward" else None,
        gate_kl=cut(rollout.gate_kl),
        teacher_logprobs=None if rollout.taught is None else cut(rollout.taught.logprobs),
        teacher_mask=None if rollout.taught is None else cut(rollout.taught.scored),
        teacher_kl=scores.teacher,
        reference_length=cut(rollout.reference_length),
    )


def learning_rows(context: Context, rollout: Rollout, objective: Objective) -> Tensor:
    """Which completions the update has a gradient in; the others need no backward pass. [B] bool"""
    blank = torch.zeros(rollout.mask.shape, device=rollout.mask.device)
    scores = Scores(logprobs=blank if rollout.old_logprobs is None else rollout.old_logprobs)
    batch = batch_of(context, rollout, slice(0, len(rollout.texts)), scores, objective)
    return ~without_gradient(batch, objective)


def update(context: Context, optimizer: Optimizer, rollout: Rollout, objective: Objective) -> UpdateOutput:
    """Do one optimizer step with the whole rollout.

    The gradient equals that of the whole batch at once: every part divides by the totals of the step.

    Raises:
        NonFiniteError: the loss, the gradient or the KL is NaN or infinite; the weights are as they were before.
    """
    learns = learning_rows(context, rollout, objective)
    seen: list[Scores] = []
    sums: dict[str, Tensor | float] = {"policy/skipped": (~learns).sum() / rollout.totals.sequences}
    optimizer.zero_grad()
    for part in context.parts(len(rollout.texts)):
        ask = _ask(context, rollout, part, objective, learns)
        scores: Scores = context.scorer(select(rollout.completions, part), ask)
        batch = batch_of(context, rollout, part, scores, objective)
        output = grpo_loss(batch, objective, totals=rollout.totals)
        output.loss.backward()
        seen.append(scores)
        measured = {name: x.double() for name, x in (output.metrics | {"train/loss": output.loss.detach()}).items()}
        measured |= head_means(batch, scores)
        for name, value in (
            added_parts(measured, rollout, part) | by_teacher(context, rollout, part, batch, scores)
        ).items():
            sums[name] = sums.get(name, 0.0) + value
    found = joined(seen, rollout.mask.shape[1])
    losses = {name: float(x) for name, x in (sums | _exact_mean(context, rollout, found)).items()}
    check_held(context, losses)
    kl_old = kl_from_old(rollout, found.logprobs)
    bound = context.config.kl.kl_early_stop
    stopped = bound is not None and kl_old > bound
    grad_norm = 0.0 if stopped else _step(context, optimizer, losses["train/loss"])
    return UpdateOutput(
        policy_logprobs=found.logprobs,
        entropy=found.entropy,
        exact=found.exact if rollout.exact_rows is not None else None,
        exact_forward=found.exact_forward if rollout.exact_rows is not None else None,
        losses=named_losses(losses),
        grad_norm=grad_norm,
        kl_old=kl_old,
        stopped=stopped,
    )


CARRIED = ("kl/log_ratio_clamped", "kl/k3_saturated")
"""Means over the tokens that carry the KL; where there are none, none is measured."""
_KEPT = (
    "train/loss",
    "train/policy_loss",
    "train/kl_penalty",
    "policy/ratio_clipped",
    "kl/weights_truncated",
    *CARRIED,
    "kl/budget",
    "kl/before_clip",
    "kl/after_clip",
    "kl/over_budget",
    "policy/skipped",
    "sampler/tokens_cut",
    "sampler/sequences_cut",
    "sampler/advantage_cut",
    "train/teacher_penalty",
    "teacher/kl",
    "teacher/k1",
    "teacher/log_ratio_clamped",
    "teacher/unscored",
    "teacher/student_mass",
    "teacher/teacher_mass",
    "teacher/overlap_ratio",
    "teacher/cut_mass",
)


def named_losses(losses: Mapping[str, float]) -> dict[str, float]:
    """What is logged of the sums of a step."""
    found = {"train/kl_penalty": 0.0} | {name: losses[name] for name in _KEPT if name in losses}
    each = {name: losses[TOKENS + name] for name in losses if TOKENS + name in losses}
    return found | {name: losses[name] / tokens for name, tokens in each.items() if tokens}


TOKENS = "tokens of "
"""Stands before the name of a sum over tokens, with which it is the number of them."""


def head_means(batch: Batch, scores: Scores) -> dict[str, Tensor]:
    """What was seen of the teacher beside the KL to it at each prefix, means over the tokens that it scored."""
    carried = carries_kl(batch.towards("teacher")) if scores.head else batch.mask
    return {f"teacher/{name}": masked_mean(each, carried).double() for name, each in scores.head.items()}


def rows_of_each(context: Context, rollout: Rollout) -> dict[str, Tensor]:
    """What stands behind a metric's name -> [B] bool the completions it is of: all, and each of several teachers'."""
    teachers, found = context.teachers, {"": torch.ones_like(rollout.completions.ended)}
    if teachers is None or len(teachers.models) < 2:
        return found
    for key in teachers.models:
        rows = [teachers.key(each) == key for each in rollout.examples]
        found[f".{key}"] = torch.tensor(rows, device=rollout.mask.device)
    return found


def by_teacher(context: Context, rollout: Rollout, part: slice, batch: Batch, scores: Scores) -> dict[str, Tensor]:
    """Of each of several teachers, sums over its tokens and the number of these; none of a single one."""
    found = dict[str, Tensor]()
    for key, rows in rows_of_each(context, rollout).items():
        if not key:
            continue
        carried, term = carries_kl(batch.towards("teacher")), context.objective.others[0].term
        asked = batch.mask & rows[part][:, None]
        mask = carried & asked
        total = kl_metrics(replace(batch, teacher_mask=mask), term)["teacher/kl"].double() * mask.sum()
        sums = {"kl": (total, mask), "unscored": ((asked & ~carried).sum().double(), asked)}
        sums |= {name: (masked_sum(each, mask).double(), mask) for name, each in scores.head.items()}
        for name, (value, counted) in sums.items():
            found |= {f"teacher/{name}{key}": value, f"{TOKENS}teacher/{name}{key}": counted.sum()}
    return found


def _exact_mean(context: Context, rollout: Rollout, found: Scores) -> dict[str, Tensor]:
    """The mean exact KL in nats per token, where every completion has it."""
    if found.exact is None or rollout.exact_rows is None or not context.exact_everywhere:
        return {}
    measured = rollout.kl_mask & rollout.exact_rows[:, None]
    return {"kl/exact": masked_sum(found.exact.detach(), measured).double() / rollout.totals.kl_tokens}


def check_held(context: Context, sums: Mapping[str, float]) -> None:
    """Refuse to take an optimizer step whose KL the controller could not go by.

    Raises:
        NonFiniteError: see `klamp.hosts.common.control.check_kl`.
    """
    kl = held_kl(sums, exact_everywhere=context.exact_everywhere)
    if kl is not None:
        check_kl(kl)


def added_parts(metrics: Mapping[str, Tensor | float], rollout: Rollout, part: slice) -> dict[str, Tensor | float]:
    """What each metric of a part adds to that of the step, by its reduction in `METRICS`; what is no mean is left out.

    Raises:
        ConfigError: a metric that is not in `METRICS`.
    """
    totals = rollout.totals
    shares: dict[Counted | None, float] = {
        "completions": (part.stop - part.start) / float(totals.sequences),
        "tokens": float(rollout.mask[part].sum()) / float(totals.tokens),
        "KL tokens": float(rollout.kl_mask[part].sum()) / float(totals.kl_tokens),
        "parts": 1.0,
    }
    counted: dict[str, Counted | None] = {name: averaged_over(name) for name in metrics}
    return {name: value * shares[counted[name]] for name, value in metrics.items() if counted[name] is not None}


def _ask(context: Context, rollout: Rollout, part: slice, objective: Objective, learns: Tensor) -> Ask:
    """The request to the scorer for an update: only what is needed and not known yet."""
    in_loss = objective.beta > 0 and objective.kl.value == "exact"
    wanted: Direction = "forward" if objective.kl.gradient == "forward" else "reverse"
    before = rollout.before
    return Ask(
        temperature=context.config.rollout.temperature,
        entropy=True,
        exact=exact_of(context, rollout, part, learns=(wanted,) if in_loss else ()),
        taught=taught_of(context, rollout, part),
        learns=None if bool(learns[part].all()) else learns[part],
        known=None if before is None else before.rows(part),
    )


def taught_of(context: Context, rollout: Rollout, part: slice) -> tuple[TeacherKL, ...]:
    """What a scorer needs to measure the KL to the teachers of a part of the rollout at each prefix."""
    if rollout.taught is None or context.teachers is None or context.teachers.how is None:
        return ()
    weighed = context.config.teacher.teacher_off_policy != "none"
    sampler = rollout.completions.sampler_logprobs if weighed else None
    return rollout.taught.asked(part, context.teachers.how, sampler)


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
        raise not_finite("the loss or its gradient is not finite", f"loss {loss}, gradient norm {grad_norm}")
    optimizer.step()
    return grad_norm


def not_finite(what: str, got: str) -> NonFiniteError:
    """The error for a loss that no optimizer step may be taken with."""
    return NonFiniteError(
        what,
        got=got,
        why="an optimizer step with it would destroy the weights",
        fix="look at kl/log_ratio_max and policy/ratio_clipped of the last steps; lower the learning rate, or set "
        "kl_max_log_ratio",
    )


def with_old_logprobs(rollout: Rollout, output: UpdateOutput) -> Rollout:
    """The rollout with the log-probabilities of the first update: later updates take their ratios to them."""
    old = output.policy_logprobs if rollout.old_logprobs is None else rollout.old_logprobs
    return replace(rollout, old_logprobs=old, before=None)


OF_THE_LAST = (
    *("policy/ratio_clipped", "kl/weights_truncated"),
    *("sampler/tokens_cut", "sampler/sequences_cut", "sampler/advantage_cut"),
)
"""What tells how far the updates of a step went from who sampled: before the first of them the ratio is 1."""


def measured(context: Context, rollout: Rollout, outputs: Sequence[UpdateOutput]) -> dict[str, float]:
    """What a step gave, by the names of `METRICS`: that of its tokens before the first update, and of its updates."""
    record = step_record(context, rollout, outputs[0])
    compared = context.config.task.reward != NO_REWARD
    metrics = step_metrics(record, group_size=context.config.rollout.num_generations if compared else 1)
    has_kl = "kl/k3" in metrics
    metrics |= {name: x for name, x in outputs[0].losses.items() if has_kl or name not in CARRIED}
    done = [o for o in outputs if not o.stopped]
    metrics["train/grad_norm"] = sum(o.grad_norm for o in done) / max(1, len(done))
    metrics["policy/updates"] = float(len(done))
    if rollout.taught is not None:
        metrics |= end_probability(context, rollout, rollout.taught)
        metrics |= reward_correlation(context, rollout, rollout.taught, outputs[0].policy_logprobs)
    if len(outputs) > 1:
        metrics["policy/kl_old"] = outputs[-1].kl_old
    return metrics | {name: outputs[-1].losses[name] for name in OF_THE_LAST if name in outputs[-1].losses}


def end_probability(context: Context, rollout: Rollout, taught: Taught) -> dict[str, float]:
    """The mean probability that the teacher gives to the end of the completions that have one; a silent killer."""
    last = rollout.completions.mask.sum(-1).clamp(min=1) - 1
    there = rollout.completions.ended & taught.mask(rollout.mask).gather(1, last[:, None])[:, 0]
    probability = torch.where(there, taught.logprobs.gather(1, last[:, None])[:, 0].exp(), 0.0).double()
    found = dict[str, float]()
    for key, rows in rows_of_each(context, rollout).items():
        if count := int(there[rows].sum()):
            found[f"teacher/end{key}"] = float(probability[rows].sum()) / count
    return found


def reward_correlation(context: Context, rollout: Rollout, taught: Taught, policy: Tensor) -> dict[str, float]:
    """The correlation within groups of the reward and of what the teacher finds likelier than the policy, per token."""
    mask, size = taught.mask(rollout.mask), context.config.rollout.num_generations
    likelier = masked_mean(masked_log_ratio(taught.logprobs, policy, mask), mask, -1)
    found = dict[str, float]()
    for key, rows in rows_of_each(context, rollout).items():
        correlation = reward_length_correlation(rollout.rewards[rows], likelier[rows], size)
        found |= {} if correlation is None else {f"teacher/reward_correlation{key}": float(correlation)}
    return found


def step_record(context: Context, rollout: Rollout, output: UpdateOutput) -> StepRecord:
    """The tokens of a step, before its first update, as `step_metrics` takes them."""
    length = context.config.rollout.max_completion_length

    def padded(x: Tensor) -> Tensor:
        return pad_tokens(x, length) if x.ndim == 2 else x

    def known(x: Tensor | None) -> Tensor | None:
        return None if x is None else padded(x)

    return StepRecord(
        mask=padded(rollout.mask),
        kl_mask=padded(rollout.kl_mask),
        policy=padded(output.policy_logprobs),
        sampler=padded(rollout.completions.sampler_logprobs),
        entropy=known(output.entropy),
        rewards=rollout.rewards,
        ended=rollout.completions.ended,
        lengths=rollout.completions.mask.sum(-1),
        repeated=repeated_pairs(rollout.completions.ids, rollout.completions.mask),
        ref=known(rollout.ref_logprobs),
        original=known(rollout.original_logprobs),
        exact=known(output.exact),
        exact_forward=known(output.exact_forward),
        exact_rows=rollout.exact_rows,
    )


def control_metrics(context: Context, beta: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """beta in force, its price, and what the controller logs; no price without a reward, or towards the sampler."""
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


def speed(tokens: float, seconds: float) -> dict[str, float]:
    """How long a step took, and its tokens per second; without these where the clock stood still."""
    found = {"speed/step_seconds": seconds}
    return found | {"speed/tokens_per_second": tokens / seconds} if seconds > 0 else found


def completion_row(context: Context, rollout: Rollout, output: UpdateOutput, i: int) -> dict[str, object]:
    """A completion with its tokens and their log-probabilities, as a line of completions.jsonl."""
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
        "ended": bool(rollout.completions.ended[i]),
        "sampler_logprobs": rollout.completions.sampler_logprobs[i][mask].tolist(),
    }
    if not torch.equal(rollout.mask[i], mask):
        row["trained"] = rollout.mask[i][mask].tolist()
    if rollout.ref_logprobs is not None:
        row["ref_logprobs"] = rollout.ref_logprobs[i][mask].tolist()
    if (taught := rollout.taught) is not None:
        scored = taught.mask(rollout.mask)[i][mask].tolist()
        logprobs = zip(taught.logprobs[i][mask].tolist(), scored, strict=True)
        row["teacher_logprobs"] = [each if there else None for each, there in logprobs]
    return row
