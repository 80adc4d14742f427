"""Greedy evaluation of every skill on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.sampling import encode_prompts, generate

BATCH = 256


def evaluate(context: Context) -> dict[str, float]:
    """Mean score of each skill, decoded greedily; the same number on every process."""
    return {skill: _mean_score(context, examples) for skill, examples in context.task.evaluation.items()}


def _mean_score(context: Context, examples: Sequence[Example]) -> float:
    mine = list(examples)[context.process :: context.processes]
    total = sum(sum(_scores(context, mine[i : i + BATCH])) for i in range(0, len(mine), BATCH))
    summed = context.sum_over_processes(torch.tensor([total, len(mine)], dtype=torch.float64, device=context.device))
    return float(summed[0] / summed[1].clamp(min=1))


def _scores(context: Context, examples: list[Example]) -> list[float]:
    prompt_ids, prompt_mask = encode_prompts([e.prompt for e in examples], context.tokenizer, context.device)
    completions = generate(
        context.policy,
        prompt_ids,
        prompt_mask,
        rollout=context.config.rollout,
        stop=context.stop,
        pad=context.pad,
        uniforms=None,
        traits=None if context.scorer is None else context.scorer.traits,
    )
    texts = completions.texts(context.tokenizer)
    return [context.task.score(e, t) for e, t in zip(examples, texts, strict=True)]
