"""Greedy evaluation of every skill on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from klamp.tasks.base import Example
from klamp.training.completions import Completions
from klamp.training.context import Context
from klamp.training.own_answers import probabilities
from klamp.training.sampling import encode_prompts, generate
from klamp.training.scoring import score

BATCH = 256
Scores = Callable[[Context, list[Example]], list[float]]


def evaluate(context: Context) -> dict[str, float]:
    """Mean score of each skill, decoded greedily (or read, see `Task.read`); the same number on every process."""
    return {
        skill: _mean(context, examples, _read if skill in context.task.read else _scores)
        for skill, examples in context.task.evaluation.items()
    }


def _mean(context: Context, examples: Sequence[Example], scores: Scores) -> float:
    mine = list(examples)[context.process :: context.processes]
    total = sum(sum(scores(context, mine[i : i + BATCH])) for i in range(0, len(mine), BATCH))
    summed = context.sum_over_processes(torch.tensor([total, len(mine)], dtype=torch.float64, device=context.device))
    return float(summed[0] / summed[1].clamp(min=1))


def _read(context: Context, examples: list[Example]) -> list[float]:
    def logprobs(given: Completions) -> Tensor:
        return score(context.policy, given, temperature=1.0).logprobs

    return probabilities(examples, context.tokenizer, context.device, logprobs)


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
