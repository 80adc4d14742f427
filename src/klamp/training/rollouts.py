"""One step's data: sampled completions, their rewards, what the reference says of them, and their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klamp.core.advantages import group_advantages
from klamp.core.clipping import clip_gate, gate_kl, kl_budget
from klamp.core.estimators import ESTIMATORS, exact_kl
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import Totals, masked_sum
from klamp.core.objective import KLTerm
from klamp.core.placement import kl_in_reward, sequence_log_ratio
from klamp.diagnostics.statistics import pad_tokens
from klamp.errors import RewardError
from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.exclusions import kl_tokens
from klamp.training.references import Reference
from klamp.training.sampling import Completions, encode_prompts, generate, uniform_numbers
from klamp.training.scoring import Scores, score, select


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """This process's share of a step: B completions, the group of a prompt next to each other."""

    examples: Sequence[Example]
    """[B] the prompts, each repeated for its group."""
    texts: Sequence[str]
    """[B] the completions as text."""
    completions: Completions
    """The tokens."""
    mask: Tensor
    """[B, T] bool: tokens to train on."""
    kl_mask: Tensor
    """[B, T] bool: tokens that carry the KL."""
    rewards: Tensor
    """[B] rewards of the task."""
    advantages: Tensor
    """[B]"""
    totals: Totals
    """Size of the whole step, over all processes."""
    ref_logprobs: Tensor | None = None
    """[B, T]; None where no reference is loaded."""
    original_logprobs: Tensor | None = None
    """[B, T] under the model that a moving reference started from."""
    exact_rows: Tensor | None = None
    """[B] bool: completions whose exact KL is measured."""
    ref_logits: Tensor | None = None
    """[sum(exact_rows), T, V] the reference's logits of those."""
    gate_kl: Tensor | None = None
    """[B] nats per sequence that the clip is gated on."""
    reference_length: Tensor | None = None
    """[B] tokens."""
    old_logprobs: Tensor | None = None
    """[B, T] log-probabilities before the first update; None until then."""


def collect(context: Context, examples: Sequence[Example], *, step: int, beta: float) -> Rollout:
    """Sample, score and rate the completions of this process's prompts.

    Args:
        context: the run.
        examples: all prompts of the step; process p of n takes those at p, p + n, ...
        step: number of the step; with the seed it determines every draw.
        beta: coefficient in force, for a KL in the reward.
    """
    config = context.config
    size = config.rollout.num_generations
    mine = torch.arange(len(examples))[context.process :: context.processes]
    chosen = [examples[int(i)] for i in mine for _ in range(size)]
    rows = (mine[:, None] * size + torch.arange(size)).reshape(-1)
    uniforms = uniform_numbers(config.run.seed, step, len(examples) * size, config.rollout.max_completion_length)
    prompt_ids, prompt_mask = encode_prompts([e.prompt for e in chosen], context.tokenizer, context.device)
    completions = generate(
        context.policy,
        prompt_ids,
        prompt_mask,
        rollout=config.rollout,
        stop=context.stop,
        pad=context.pad,
        uniforms=uniforms[rows],
    )
    texts = completions.texts(context.tokenizer)
    rewards = _rewards(context, chosen, texts)
    mask, kl_mask = _masks(context, completions)
    rollout = Rollout(
        examples=chosen,
        texts=texts,
        completions=completions,
        mask=mask,
        kl_mask=kl_mask,
        rewards=rewards,
        advantages=torch.zeros(len(chosen), device=context.device),
        totals=_totals(context, mask, kl_mask),
        reference_length=_reference_length(context, chosen),
    )
    rollout = _with_reference(context, rollout)
    return _with_advantages(context, _with_policy_pass(context, rollout, beta), beta)


def _rewards(context: Context, examples: Sequence[Example], texts: Sequence[str]) -> Tensor:
    """The task's rewards, [B]. An error on one process stops all of them, so that none waits for it in vain."""
    rewards: list[float] = []
    error: RewardError | None = None
    try:
        rewards = [context.task.score(e, t) for e, t in zip(examples, texts, strict=True)]
    except RewardError as raised:
        error = raised
    failed = context.sum_over_processes(torch.tensor(float(error is not None), device=context.device))
    if error is not None:
        raise error
    if failed > 0:
        raise RewardError("the reward function failed on another process", why="that process says how")
    return torch.tensor(rewards, dtype=torch.float32, device=context.device)


def _masks(context: Context, completions: Completions) -> tuple[Tensor, Tensor]:
    mask = completions.mask
    if context.config.rollout.mask_truncated_completions:
        mask = mask & completions.ended[:, None]
    return mask, kl_tokens(completions.ids, mask, context.config.kl, context.excluded, context.tokenizer)


def _totals(context: Context, mask: Tensor, kl_mask: Tensor) -> Totals:
    counts = torch.tensor([mask.shape[0], mask.sum(), kl_mask.sum()], dtype=torch.float64, device=mask.device)
    sequences, tokens, kl_tokens = (max(1.0, float(x)) for x in context.sum_over_processes(counts))
    return Totals(sequences, tokens, kl_tokens)


def _reference_length(context: Context, examples: Sequence[Example]) -> Tensor | None:
    given = [e.reference_length or context.reference_length for e in examples]
    if any(length is None for length in given):
        return None
    return torch.tensor(given, dtype=torch.float32, device=context.device)


def _exact_rows(context: Context, rows: int) -> Tensor:
    """Which completions get an exact KL: the first few of each group, the same ones however the step is split."""
    size = context.config.rollout.num_generations
    return torch.arange(rows, device=context.device) % size < context.exact_completions


def _with_reference(context: Context, rollout: Rollout) -> Rollout:
    if context.reference is None:
        return rollout
    rows = _exact_rows(context, len(rollout.texts))
    logprobs, logits = _scored(context, rollout, context.reference, rows)
    if context.original is not None:
        original, _ = _scored(context, rollout, context.original, None)
        rollout = replace(rollout, original_logprobs=original)
    return replace(rollout, ref_logprobs=logprobs, exact_rows=None if logits is None else rows, ref_logits=logits)


def _scored(
    context: Context, rollout: Rollout, reference: Reference, rows: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all completions under a reference, and its logits in the rows asked for."""
    length = rollout.mask.shape[1]
    logprobs: list[Tensor] = []
    logits: list[Tensor] = []
    for part in context.parts(len(rollout.texts)):
        scores = reference.score(select(rollout.completions, part), temperature=context.config.rollout.temperature)
        logprobs.append(pad_tokens(scores.logprobs, length))
        if rows is not None and scores.logits is not None:
            kept = scores.logits[rows[part]]
            logits.append(torch.nn.functional.pad(kept, (0, 0, 0, length - kept.shape[1])))
    return torch.cat(logprobs), torch.cat(logits) if logits else None


def exact_of(
    rollout: Rollout, part: slice, scores: Scores, *, forward: bool = False, grad: bool = False
) -> Tensor | None:
    """Exact KL of a part of the rollout, [b, t]; 0 in rows where it is not measured, None where in none of them."""
    if rollout.exact_rows is None or rollout.ref_logits is None or scores.logits is None:
        return None
    rows = rollout.exact_rows[part]
    if not bool(rows.any()):
        return None
    first = int(rollout.exact_rows[: part.start].sum())
    ref = rollout.ref_logits[first : first + int(rows.sum()), : scores.logits.shape[1]]
    with torch.set_grad_enabled(grad):
        exact = exact_kl(scores.logits[rows], ref, direction="forward" if forward else "reverse")
        whole = torch.zeros(scores.logprobs.shape, device=exact.device, dtype=exact.dtype)
        return whole.masked_scatter(rows[:, None].expand_as(whole), exact)


def _with_policy_pass(context: Context, rollout: Rollout, beta: float) -> Rollout:
    """Score with the policy before any update, only where something before the loss depends on it."""
    term = context.objective.kl
    if beta <= 0 or (term.clip_method == "none" and term.placement != "reward"):
        return rollout
    logprobs, exact = [], []
    length = rollout.mask.shape[1]
    with torch.no_grad():
        for part in context.parts(len(rollout.texts)):
            scores = score(
                context.policy, select(rollout.completions, part), temperature=context.config.rollout.temperature
            )
            logprobs.append(pad_tokens(scores.logprobs, length))
            found = exact_of(rollout, part, scores)
            exact.append(torch.zeros_like(logprobs[-1]) if found is None else pad_tokens(found, length))
    rollout = replace(rollout, old_logprobs=torch.cat(logprobs))
    return replace(rollout, gate_kl=_gate(context, rollout, torch.cat(exact), term))


def _gate(context: Context, rollout: Rollout, exact: Tensor, term: KLTerm) -> Tensor | None:
    """Low-noise KL of each completion: exact where every completion has it, else k3 averaged over the group."""
    if term.clip_method == "none" or rollout.old_logprobs is None or rollout.ref_logprobs is None:
        return None
    if rollout.exact_rows is not None and bool(rollout.exact_rows.all()):
        per_sequence, level = masked_sum(exact, rollout.kl_mask, -1), term.clip_level
    else:
        delta = masked_log_ratio(rollout.old_logprobs, rollout.ref_logprobs, rollout.kl_mask)
        per_sequence = masked_sum(ESTIMATORS["k3"].value(delta), rollout.kl_mask, -1)
        level = "group" if term.clip_level == "sequence" else term.clip_level
    if level == "batch":
        mean = context.gather(per_sequence).mean()
        return mean.expand_as(per_sequence)
    return gate_kl(per_sequence, level=level, group_size=context.config.rollout.num_generations)


def _clip_factor(term: KLTerm, rollout: Rollout) -> float | Tensor:
    """What the clip leaves of each completion's KL in the reward: the gate, as for the other placements."""
    if rollout.gate_kl is None:
        return 1.0
    budget = kl_budget(term.clip_threshold, per_token=term.clip_per_token, reference_length=rollout.reference_length)
    return clip_gate(rollout.gate_kl, budget, method=term.clip_method, temperature=term.clip_temperature)


def _with_advantages(context: Context, rollout: Rollout, beta: float) -> Rollout:
    rewards, loss = rollout.rewards, context.config.loss
    if beta > 0 and context.objective.kl.placement == "reward":
        assert rollout.old_logprobs is not None and rollout.ref_logprobs is not None
        spent = sequence_log_ratio(
            rollout.old_logprobs,
            rollout.ref_logprobs,
            rollout.kl_mask,
            max_log_ratio=context.objective.kl.max_log_ratio,
        )
        rewards = kl_in_reward(rewards, spent * _clip_factor(context.objective.kl, rollout), beta=beta)
    advantages = group_advantages(
        rewards, context.config.rollout.num_generations, scale=loss.scale, baseline=loss.advantage_baseline
    )
    return replace(rollout, advantages=advantages)
