"""Evaluation of every skill on held-out prompts: answers are decoded greedily, or given ones read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from klamp.scoring.completions import Completions
from klamp.scoring.scorer import score
from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.rollouts import completed
from klamp.training.sampling import encode_prompts

BATCH = 256
"""Prompts that are answered at a time."""
READ_AT_ONCE = 16
"""Answers whose logits are held at a time."""


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
        write=lambda examples: completed(context, [e.prompt for e in examples], uniforms=None).texts(context.tokenizer),
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
            texts = [text for part in _parts(mine, BATCH) for text in write(part)]
            rated = [context.task.score(e, t) for e, t in zip(mine, texts, strict=True)]
            rows = zip(mine, texts, rated, strict=True)
            answers += [
                {"skill": e.skill, "question": e.question, "completion": text, "score": rating}
                for e, text, rating in islice(rows, context.config.run.log_answers)
            ]
        totals = torch.tensor([sum(rated), len(mine)], dtype=torch.float64, device=context.device)
        summed = context.sum_over_processes(totals)
        scores[skill] = float(summed[0] / summed[1].clamp(min=1))
    return Evaluation(scores=scores, answers=answers)


def _parts(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    return (examples[i : i + size] for i in range(0, len(examples), size))


def probabilities(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    logprobs_of: Callable[[Completions], Tensor],
) -> list[float]:
    """The probability that a model gives each token of an example's answer, at temperature 1.

    Equation: exp(mean over t of log p(answer_t | prompt, answer_<t)), one over the answer's perplexity; in (0, 1].

    Args:
        examples: with the answers.
        tokenizer: the model's.
        device: where the tokens go.
        logprobs_of: gives [B, T] log-probabilities of the completions' tokens under the model, in nats.
    """
    rated: list[float] = []
    for part in _parts(examples, READ_AT_ONCE):
        given = answers_as_completions(part, tokenizer, device)
        with torch.no_grad():
            logprobs = logprobs_of(given).double()
        means = torch.where(given.mask, logprobs, 0.0).sum(-1) / given.mask.sum(-1)
        rated += means.exp().tolist()
    return rated


def answers_as_completions(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Completions:
    """The answers as if they had been sampled; no end token is added, for an answer may go on after its sentence."""
    prompt_ids, prompt_mask = encode_prompts([e.prompt for e in examples], tokenizer, device)
    given: Any = tokenizer(
        [e.answer for e in examples], return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
    )
    ids, mask = given["input_ids"].to(device), given["attention_mask"].bool().to(device)
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros_like(ids, dtype=torch.float32),
        ended=torch.ones(len(ids), dtype=torch.bool, device=device),
    )
