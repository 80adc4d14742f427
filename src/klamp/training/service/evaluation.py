"""Evaluates weights at the service, and measures how long the reference's completions are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.scoring.completions import Completions
from klamp.tasks.base import Example
from klamp.training.context import Context
from klamp.training.evaluation import Evaluation, evaluated
from klamp.training.own_answers import probabilities
from klamp.training.reference_length import PROMPTS, is_needed
from klamp.training.sampling import encode_prompts
from klamp.training.service.connection import Connection
from klamp.training.service.rollout import TinkerReference, kept_ids, sample, seed_of


def evaluate(context: Context, connection: Connection, client: Any) -> Evaluation:
    """Decode every held-out prompt greedily from the client's weights and score it (or read it there)."""
    policy = TinkerReference(connection, client, "the policy")

    def logprobs(given: Completions) -> Tensor:
        return policy.score(given, temperature=1.0).logprobs

    return evaluated(
        context,
        write=lambda examples: _completed(context, connection, client, examples),
        read=lambda examples: probabilities(examples, context.tokenizer, torch.device("cpu"), logprobs),
    )


def _completed(context: Context, connection: Connection, client: Any, examples: Sequence[Example]) -> list[str]:
    """Greedy completions."""
    groups = _answers(context, connection, client, examples, temperature=0.0)
    return context.tokenizer.batch_decode([row.tokens for (row,) in groups], skip_special_tokens=True)


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
