"""Skills that are read instead of answered: how likely the policy finds a given answer, per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from klamp.scoring.completions import Completions
from klamp.tasks.base import Example
from klamp.training.sampling import encode_prompts

READ_AT_ONCE = 16
"""Answers whose logits are held at a time."""


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
    found: list[float] = []
    for first in range(0, len(examples), READ_AT_ONCE):
        given = answers_as_completions(examples[first : first + READ_AT_ONCE], tokenizer, device)
        with torch.no_grad():
            logprobs = logprobs_of(given).double()
        means = torch.where(given.mask, logprobs, 0.0).sum(-1) / given.mask.sum(-1)
        found += means.exp().tolist()
    return found


def answers_as_completions(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> Completions:
    """The answers as if they had been sampled; no end token is added, for an answer may go on after its sentence."""
    prompt_ids, prompt_mask = encode_prompts([e.prompt for e in examples], tokenizer, device)
    texts = tokenizer([e.answer for e in examples], add_special_tokens=False)["input_ids"]
    rows = [torch.tensor(ids, device=device) for ids in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1], device=device) < torch.tensor([len(row) for row in rows], device=device)[:, None]
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=ids,
        mask=mask,
        sampler_logprobs=torch.zeros_like(ids, dtype=torch.float32),
        ended=torch.ones(len(rows), dtype=torch.bool, device=device),
    )
