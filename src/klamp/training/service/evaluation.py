"""Evaluates weights at the service, and measures how long the reference's completions are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.reference_length import PROMPTS, is_needed
from klamp.training.sampling import encode_prompts
from klamp.training.service.connection import Connection
from klamp.training.service.rollout import TinkerReference, kept_ids, sample, seed_of


def scores(context: Context, connection: Connection, client: Any) -> dict[str, float]:
    """The mean score of each skill, with completions decoded greedily from the client's weights."""
    return {skill: _mean(context, connection, client, rows) for skill, rows in context.task.evaluation.items()}


def _mean(context: Context, connection: Connection, client: Any, examples: Sequence[Example]) -> float:
    groups = _answers(context, connection, client, examples, temperature=0.0)
    texts = context.tokenizer.batch_decode([row.tokens for (row,) in groups], skip_special_tokens=True)
    rated = [context.task.score(example, text) for example, text in zip(examples, texts, strict=True)]
    return sum(rated) / max(1, len(rated))


def measure_length(context: Context, connection: Connection) -> None:
    """Measure and set the run's reference length, where a clip needs one: 64 completions of the reference."""
    reference = context.reference
    if not isinstance(reference, TinkerReference) or not is_needed(context):
        return
    groups = _answers(context, connection, reference.client, context.task.train[:PROMPTS], temperature=1.0)
    context.control.reference_length = sum(len(row.tokens) for (row,) in groups) / len(groups)


def _answers(
    context: Context, connection: Connection, client: Any, examples: Sequence[Example], *, temperature: float
) -> list[list[Any]]:
    """One completion for each example's prompt."""
    if not examples:
        return []
    ids, mask = encode_prompts([e.prompt for e in examples], context.tokenizer, torch.device("cpu"))
    return sample(
        connection,
        client,
        kept_ids(ids, mask),
        count=1,
        seeds=[seed_of(context.config.run.seed, -1, i) for i in range(len(examples))],
        max_tokens=context.config.rollout.max_completion_length,
        temperature=temperature,
    )
