"""Scores of skills on held-out prompts, and fingerprints of task and anchors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from klamp.lab.anchors import LocalReference, Reference
from klamp.lab.rollouts import completed
from klamp.lab.sampling import encode_prompts
from klamp.lab.setup import Context
from klamp.lab.tasks.base import Example
from klamp.scoring.completions import Completions
from klamp.scoring.scorer import score

BATCH = 256  # prompts that are answered at a time
READ_AT_ONCE = 16  # answers whose logits are held at a time


def evaluate(context: Context) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Skill -> mean score of greedy answers (of `Task.read`: probabilities); the first answers of each skill."""
    scores, answers = dict[str, float](), list[dict[str, Any]]()
    for skill, examples in context.task.evaluation.items():
        if skill in context.task.read:
            ratings = probabilities(examples, context.tokenizer, context.policy)
        else:
            rows = _answered(context, [(example, example.prompt) for example in examples])
            ratings = [row["score"] for row in rows]
            answers += rows[: context.config.run.log_answers]
        scores[skill] = sum(ratings) / max(1, len(examples))
    return scores, answers


def _answered(
    context: Context, pairs: Sequence[tuple[Example, str]], reference: LocalReference | None = None
) -> list[dict[str, Any]]:
    """The greedy answers of the policy, or of a reference, to (example, prompt) pairs, and their scores."""
    texts: list[str] = []
    for i in range(0, len(pairs), BATCH):
        prompts = [prompt for _, prompt in pairs[i : i + BATCH]]
        texts += completed(context, prompts, uniforms=None, reference=reference).texts(context.tokenizer)
    return [
        {"skill": e.skill, "question": e.question, "completion": text, "score": context.task.score(e, text)}
        for (e, _), text in zip(pairs, texts, strict=True)
    ]


def teacher_answers(context: Context) -> list[dict[str, Any]]:
    """The greedy answers of local teachers, each behind its own prompt, like the answers of `evaluate`."""
    task, teachers, count = context.task, context.teachers, context.config.run.log_answers
    if teachers is None:
        return []
    shown = [row for skill, rows in task.evaluation.items() if skill not in task.read for row in rows[:count]]
    answers: list[dict[str, Any]] = []
    for key, model in teachers.models.items():
        prompts = [(example, teachers.prompt(example)) for example in shown if teachers.key(example) == key]
        if isinstance(model, LocalReference):
            pairs = [(example, prompt) for example, prompt in prompts if prompt is not None]
            answers += [{**row, "who": "teacher"} for row in _answered(context, pairs, model)]
    return answers


def probabilities(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> list[float]:
    """The probability that a model gives each token of an example's answer, at temperature 1.

    Equation: exp(mean over t of log p(answer_t | prompt, answer_<t)), one over the answer's perplexity; in (0, 1].
    """
    device, ratings = next(model.parameters()).device, list[float]()
    for i in range(0, len(examples), READ_AT_ONCE):
        answers = answers_as_completions(examples[i : i + READ_AT_ONCE], tokenizer, device)
        with torch.no_grad():
            logprobs = score(model, answers, temperature=1.0).logprobs.double()
        means = torch.where(answers.mask, logprobs, 0.0).sum(-1) / answers.mask.sum(-1)
        ratings += means.exp().tolist()
    return ratings


def answers_as_completions(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, device: torch.device, longest: int | None = None
) -> Completions:
    """The answers (their first tokens) as if they had been sampled; no end token is added: an answer may go on."""
    prompt_ids, prompt_mask = encode_prompts([e.prompt for e in examples], tokenizer, device)
    ids, mask = encode_prompts([e.answer for e in examples], tokenizer, device, side="right")
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=ids[:, :longest],
        mask=mask[:, :longest].bool(),
        sampler_logprobs=torch.zeros(ids[:, :longest].shape, device=device),
        ended=torch.ones(len(ids), dtype=torch.bool, device=device),
    )


PROBES, PROBE_TOKENS = 4, 8  # prompts whose first tokens are scored, and how many


def fingerprints(context: Context) -> dict[str, Any]:
    """Name -> SHA-256 of a text, or log-probabilities in nats of a few tokens under a reference or teacher."""
    rows = {"": context.task.train, **context.task.evaluation}  # the prompts as the policy sees them
    texts = {skill: [(example.prompt, example.answer) for example in examples] for skill, examples in rows.items()}
    digest = hashlib.sha256(json.dumps(texts, default=str).encode()).hexdigest()
    anchors = {name: anchor for name, anchor in context.anchors.items() if name not in context.moving}
    anchors |= {} if context.original is None else {"reference": context.original}
    if context.config.teacher.kind == "live":  # the policy, which moves too
        del anchors["teacher"]
    return {"task": digest} | {name: _scores(context, anchor) for name, anchor in anchors.items()}


def _scores(context: Context, model: Reference) -> list[float]:
    """The log-probabilities of the first tokens of a few prompts, each behind its own prompt."""
    examples = [replace(example, answer=example.prompt) for example in context.task.train[:PROBES]]
    completions = answers_as_completions(examples, context.tokenizer, context.device, longest=PROBE_TOKENS)
    logprobs = model.score(completions, temperature=context.config.rollout.temperature).logprobs
    return [round(x, 4) for x in logprobs[completions.mask].tolist()]
