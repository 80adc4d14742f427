"""The loss of a step once more, written plainly: one sequence at a time, no padding, no mask, nothing from klamp.core.

It is what `collect` and `update` are held against.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.lab.rollouts import Rollout
from klamp.lab.setup import Context


@dataclass
class Row:
    """One completion under the policy (with gradient) and under the reference."""

    tokens: list[int]
    sampler: Tensor
    policy: Tensor
    ref: Tensor
    exact: Tensor
    exact_forward: Tensor
    reward: float
    trained: bool
    carried: Tensor


@dataclass
class Losses:
    policy: Tensor
    kl: Tensor

    @property
    def total(self) -> Tensor:
        return self.policy + self.kl


def rows_of(context: Context, rollout: Rollout) -> list[Row]:
    """Every completion by itself, scored by unpadded forwards and rated anew."""
    config, completions, found = context.config, rollout.completions, []
    for i in range(len(rollout.texts)):
        prompt = completions.prompt_ids[i][completions.prompt_mask[i].bool()]
        ids = completions.ids[i][completions.mask[i]]
        both = torch.cat([prompt, ids])[None]
        rows = []
        for model in (context.policy, context.reference.model):
            logits = model(both).logits[0, len(prompt) - 1 : -1] / config.rollout.temperature
            rows.append(logits.log_softmax(-1))
        ours, theirs = rows[0], rows[1].detach()
        at = torch.arange(len(ids))
        text = context.tokenizer.decode(ids, skip_special_tokens=True)
        ended = int(ids[-1]) in context.stop
        excluded = torch.tensor([int(x) in config.kl.kl_exclude_tokens for x in ids])
        found.append(
            Row(
                tokens=ids.tolist(),
                sampler=completions.sampler_logprobs[i, : len(ids)],
                policy=ours[at, ids],
                ref=theirs[at, ids],
                exact=(ours.exp() * (ours - theirs)).sum(-1),
                exact_forward=(theirs.exp() * (theirs - ours)).sum(-1),
                reward=sum(c.isdigit() for c in text) / 6,
                trained=ended or not config.rollout.mask_truncated_completions,
                carried=~excluded,
            )
        )
    return found


def later(x: Tensor) -> Tensor:
    return torch.stack([x[t + 1 :].sum() for t in range(len(x))])


def advantages_of(context: Context, rows: list[Row], beta: float) -> list[float]:
    config, size = context.config, context.config.rollout.num_generations
    rewards = [row.reward for row in rows]
    if config.kl.kl_placement == "reward":
        rewards = [
            r - beta * float(_delta(context, row)[row.carried].sum()) for r, row in zip(rewards, rows, strict=True)
        ]
    found: list[float] = []
    for start in range(0, len(rows), size):
        group = rewards[start : start + size]
        mean = sum(group) / size
        spread = (sum((r - mean) ** 2 for r in group) / (size - 1)) ** 0.5
        scale = spread + 1e-4 if config.loss.scale == "std" else 1.0
        without_own = config.loss.advantage_baseline == "leave_one_out"
        baselines = [(sum(group) - r) / (size - 1) if without_own else mean for r in group]
        found += [(r - b) / scale if spread else 0.0 for r, b in zip(group, baselines, strict=True)]
    return found


def gates_of(context: Context, rows: list[Row], reference_length: float | None) -> list[dict[str, float]]:
    """KL, budget, factor on the gradient and clipped KL of every completion."""
    kl, size = context.config.kl, context.config.rollout.num_generations
    if kl.kl_clip_method == "none":
        return [{"factor": 1.0, "shift": 0.0} for _ in rows]
    each = [float(row.exact.detach()[row.carried].sum()) for row in rows]
    if context.exact_completions < size:
        deltas = [(row.policy - row.ref).detach()[row.carried] for row in rows]
        each = [float((torch.exp(-d) - 1 + d).sum()) for d in deltas]
    own = kl.kl_estimator == "exact" and kl.kl_horizon == "token" and context.exact_completions == size
    seen = []
    for i in range(len(rows)):
        group = range(len(rows)) if kl.kl_clip_level == "batch" else range(i - i % size, i - i % size + size)
        members = [j for j in group if own or j != i]
        seen.append(each[i] if own and kl.kl_clip_level is None else sum(each[j] for j in members) / len(members))
    budget = kl.kl_clip_threshold * (reference_length if kl.use_per_token_kl_threshold else 1.0)
    found = []
    for row, value in zip(rows, seen, strict=True):
        x = (value - budget) / kl.kl_clip_temperature
        hard = kl.kl_clip_method == "hard"
        factor = float(value > budget) if hard else float(torch.sigmoid(torch.tensor(x)))
        soft = kl.kl_clip_temperature * float(torch.nn.functional.softplus(torch.tensor(x)))
        clipped = max(0.0, value - budget) if hard else soft
        shift = (clipped - factor * value) / max(1, int(row.carried.sum()))
        found.append({"factor": factor, "shift": shift, "over": value > budget})
    return found


def loss_of(context: Context, rollout: Rollout, *, beta: float, old: list[Tensor] | None = None) -> Losses:
    rows, objective = rows_of(context, rollout), context.objective
    before = [row.policy.detach() for row in rows] if old is None else old
    gates = gates_of(context, rows, context.control.reference_length)
    surrogate, penalty = [], []
    for row, a, was, gate in zip(rows, advantages_of(context, rows, beta), before, gates, strict=True):
        advantage = torch.full_like(row.policy.detach(), a)
        if objective.terms[0].term.placement == "advantage":
            delta = torch.where(row.carried, was - row.ref, 0.0)
            total = delta + later(delta) if objective.terms[0].term.horizon == "sequence" else delta
            advantage = advantage - beta * gate["factor"] * total
        ratio = (row.policy - was).exp()
        bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        surrogate.append(-torch.minimum(ratio * advantage, bounded * advantage))
        penalty.append(gate["factor"] * _penalty(context, row) + gate["shift"] * row.carried)
    every = [torch.ones(len(row.tokens), dtype=torch.bool) for row in rows]
    carried = [row.carried for row in rows]
    policy = _reduced(context, surrogate, every, [row.trained for row in rows], objective.reduction)
    reduction = objective.terms[0].term.normalizer or objective.reduction
    kl = _reduced(context, penalty, carried, [row.trained for row in rows], reduction)
    in_loss = objective.terms[0].term.placement == "loss"
    return Losses(policy=policy, kl=beta * kl if in_loss else torch.zeros(()))


def _delta(context: Context, row: Row) -> Tensor:
    bound = context.objective.terms[0].term.max_log_ratio or float("inf")
    return (row.policy - row.ref).detach().clamp(-bound, bound)


def _penalty(context: Context, row: Row) -> Tensor:
    """Value and gradient of every token's penalty; an excluded token has none but for what it does to later ones."""
    term, delta = context.objective.terms[0].term, torch.where(row.carried, _delta(context, row), 0.0)
    log_w = (row.policy.detach() - row.sampler) * (term.off_policy != "none")
    if term.off_policy == "sequence":
        log_w = log_w.cumsum(0)
    w = log_w.exp().clamp(max=term.max_weight or float("inf"))
    score = row.policy - row.policy.detach()
    if term.value == "exact":
        source = row.carried * (row.exact_forward if term.gradient == "forward" else row.exact)
        value = row.carried * row.exact.detach()
        return value + source - source.detach() + (later(value) * score if term.horizon == "sequence" else 0.0)
    k3 = torch.exp(-delta) - 1 + delta
    coefficient = {"reverse": w * delta, "forward": w * (1 - torch.exp(-delta))}[term.gradient]
    if term.horizon == "sequence":
        coefficient = coefficient + later(w * k3)
    return w * k3 + coefficient * score


def _reduced(
    context: Context, values: list[Tensor], counted: list[Tensor], trained: list[bool], reduction: str
) -> Tensor:
    sums = [x.sum() if used else torch.zeros(()) for x, used in zip(values, trained, strict=True)]
    counts = [int(c.sum()) if used else 0 for c, used in zip(counted, trained, strict=True)]
    if reduction == "token_mean":
        return sum(sums) / max(1, sum(counts))
    if reduction == "sequence_mean":
        return sum(x / max(1, n) for x, n in zip(sums, counts, strict=True)) / len(sums)
    return sum(sums) / (
        len(sums) * (context.config.rollout.max_completion_length if reduction == "fixed_length" else 1)
    )
