"""Measures the reference's mean completion length, once before the first step; then it is frozen."""

from __future__ import annotations

import torch

from klamp.training.context import Context
from klamp.training.references import LocalReference
from klamp.training.sampling import encode_prompts, generate, uniform_numbers

PROMPTS = 64


def is_needed(context: Context) -> bool:
    """Whether a clip needs a reference length that neither the user nor the data gives."""
    wanted = context.reference is not None and context.objective.kl.needs_reference_length
    column = [example.reference_length for example in context.task.train]
    return wanted and None in context.control.reference_lengths(column)


def measure_reference_length(context: Context) -> None:
    """Measure and set the run's reference length, where a clip needs one that nobody gives.

    Equation: mean number of tokens (end token included) of one completion each of 64 training prompts, sampled from
    the reference at the run's temperature. Every process measures the same prompts with the same draws.
    """
    if context.reference is None or not is_needed(context):
        return
    prompts = [e.prompt for e in context.task.train[:PROMPTS]]
    rollout = context.config.rollout
    ids, mask = encode_prompts(prompts, context.tokenizer, context.device)
    with context.reference.sampling_model() as model:
        completions = generate(
            model,
            ids,
            mask,
            rollout=rollout,
            stop=context.stop,
            pad=context.pad,
            uniforms=uniform_numbers(context.config.run.seed, -1, len(prompts), rollout.max_completion_length),
            traits=context.reference.scorer.traits if isinstance(context.reference, LocalReference) else None,
        )
    context.control.reference_length = float(completions.mask.sum(-1).to(torch.float64).mean())
