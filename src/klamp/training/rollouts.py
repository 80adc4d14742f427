"""One step's data: sampled completions, their rewards, what the reference says of them, and their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from klamp.core.advantages import group_advantages
from klamp.core.estimators import exact_kl
from klamp.core.masking import Totals
from klamp.core.term import Gate, sequence_gate_kl, shifted_rewards
from klamp.core.types import Batch
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
    if term.clip_method == "none":
        return rollout
    everywhere = rollout.exact_rows is not None and bool(rollout.exact_rows.all())
    batch = replace(_before_updates(context, rollout), exact_kl=torch.cat(exact) if everywhere else None)
    return replace(rollout, gate_kl=sequence_gate_kl(batch, term, mean=lambda kl: context.gather(kl).mean()))


def _before_updates(context: Context, rollout: Rollout) -> Batch:
    """The rollout as the policy saw it before its first update."""
    assert rollout.old_logprobs is not None
    return Batch(
        policy_logprobs=rollout.old_logprobs,
        mask=rollout.mask,
        kl_mask=rollout.kl_mask,
        advantages=rollout.advantages,
        ref_logprobs=rollout.ref_logprobs,
        gate_kl=rollout.gate_kl,
        reference_length=rollout.reference_length,
        group_size=context.config.rollout.num_generations,
    )


def _with_advantages(context: Context, rollout: Rollout, beta: float) -> Rollout:
    rewards, loss, term = rollout.rewards, context.config.loss, context.objective.kl
    if beta > 0 and term.placement == "reward":
        batch = _before_updates(context, rollout)
        rewards = shifted_rewards(rewards, batch, term, beta=beta, gate=Gate.of(batch, term))
    advantages = group_advantages(
        rewards, context.config.rollout.num_generations, scale=loss.scale, baseline=loss.advantage_baseline
    )
    return replace(rollout, advantages=advantages)
