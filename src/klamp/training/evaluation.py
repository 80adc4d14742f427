"""Greedy evaluation of every skill on held-out prompts."""

from __future__ import annotations

import torch

from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.sampling import encode_prompts, generate

BATCH = 256


def evaluate(context: Context) -> dict[str, float]:
    """Mean score of each skill, decoded greedily; the same number on every process."""
    return {skill: _mean_score(context, examples) for skill, examples in context.task.evaluation.items()}


def _mean_score(context: Context, examples: object) -> float:
    rows: list[Example] = list(examples)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]
    mine = rows[context.process :: context.processes]
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
    )
    kept = [ids[mask] for ids, mask in zip(completions.ids, completions.mask, strict=True)]
    texts = context.tokenizer.batch_decode(kept, skip_special_tokens=True)
    return [context.task.score(e, t) for e, t in zip(examples, texts, strict=True)]
