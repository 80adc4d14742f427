"""Greedy evaluation of every skill on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.scoring.completions import Completions
from klamp.scoring.scores import score
from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.own_answers import probabilities
from klamp.training.sampling import encode_prompts, generate

BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found."""

    scores: dict[str, float]
    """Skill -> mean score, the same on every process."""
    answers: list[dict[str, object]]
    """The first answers of each skill, as lines of answers.jsonl; those of this process."""


def evaluate(context: Context) -> Evaluation:
    """Decode every held-out prompt greedily and score it; a skill of `Task.read` is read instead."""

    def logprobs(given: Completions) -> Tensor:
        return score(context.policy, given, temperature=1.0).logprobs

    return evaluated(
        context,
        write=lambda examples: _completed(context, examples),
        read=lambda examples: probabilities(examples, context.tokenizer, context.device, logprobs),
    )


def evaluated(
    context: Context,
    *,
    write: Callable[[Sequence[Example]], list[str]],
    read: Callable[[Sequence[Example]], list[float]],
) -> Evaluation:
    """Every skill's mean score over all processes, and some answers.

    Args:
        context: the run, with its task.
        write: gives one completion for each example.
        read: gives the probability of each example's own answer.
    """
    scores: dict[str, float] = {}
    answers: list[dict[str, object]] = []
    for skill, examples in context.task.evaluation.items():
        mine = list(examples)[context.process :: context.processes]
        if skill in context.task.read:
            rated = read(mine)
        else:
            texts = [text for part in _batches(mine) for text in write(part)]
            rated = [context.task.score(e, t) for e, t in zip(mine, texts, strict=True)]
            rows = zip(mine, texts, rated, strict=True)
            answers += [_row(*row) for row, _ in zip(rows, range(context.config.run.log_answers), strict=False)]
        totals = torch.tensor([sum(rated), len(mine)], dtype=torch.float64, device=context.device)
        summed = context.sum_over_processes(totals)
        scores[skill] = float(summed[0] / summed[1].clamp(min=1))
    return Evaluation(scores=scores, answers=answers)


def _batches(examples: list[Example]) -> Iterator[list[Example]]:
    return (examples[i : i + BATCH] for i in range(0, len(examples), BATCH))


def _row(example: Example, completion: str, rated: float) -> dict[str, object]:
    return {"skill": example.skill, "question": example.question, "completion": completion, "score": rated}


def _completed(context: Context, examples: Sequence[Example]) -> list[str]:
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
    return completions.texts(context.tokenizer)
