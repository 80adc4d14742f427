"""Draws tokens from a distribution by a given uniform number, through the cumulative distribution."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from klamp.training.config import RolloutConfig

BLOCK = 256
"""How many neighbouring tokens are summed to a block before single tokens are looked at."""


def warpers_of(rollout: RolloutConfig) -> LogitsProcessorList:
    """The top-p and top-k of a configuration, as transformers' own functions."""
    warpers = LogitsProcessorList()
    if rollout.top_k > 0:
        warpers.append(TopKLogitsWarper(rollout.top_k))
    if rollout.top_p < 1:
        warpers.append(TopPLogitsWarper(rollout.top_p))
    return warpers


def draw(
    scores: Tensor, uniforms: Tensor, *, temperature: float, warpers: LogitsProcessorList
) -> tuple[Tensor, Tensor]:
    """The next token of each sequence, and its log-probability under the distribution it is drawn from, in nats.

    Equation: the first token at which the cumulative distribution exceeds the uniform number, in float64. The sum
    runs over blocks of tokens and then within one, so that few of the float64 numbers are ever formed.

    Shapes: scores [B, V], uniforms [B] in [0, 1), float64 -> [B], [B].
    """
    scaled = scores.float() if temperature == 1 else scores.float() / temperature
    if len(warpers):
        scaled = warpers(None, scaled)  # pyright: ignore[reportArgumentType]
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    blocks = _block_sums(weights)
    block, left = _invert(blocks, uniforms.to(weights.device).unsqueeze(-1), total=True)
    inside = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    beyond = inside >= weights.shape[1]
    within = weights.gather(-1, inside.clamp(max=weights.shape[1] - 1)).double().masked_fill(beyond, 0.0)
    token = block * BLOCK + _invert(within, left, total=False)[0]
    logprob = scaled.gather(-1, token) - top - blocks.sum(-1, keepdim=True).log()
    return token.squeeze(-1), logprob.float().squeeze(-1)


def _block_sums(weights: Tensor) -> Tensor:
    """The sums of each BLOCK neighbours, in float64; the last block may be shorter."""
    whole = weights.shape[1] // BLOCK * BLOCK
    parts = [weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1, dtype=torch.float64)] if whole else []
    if whole < weights.shape[1]:
        parts.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    return torch.cat(parts, dim=-1)


def _invert(weights: Tensor, at: Tensor, *, total: bool) -> tuple[Tensor, Tensor]:
    """The first entry at which the cumulative sum exceeds `at` times the total, and how far into it that is. [B, 1]

    The last possible entry, not the last of all, where rounding puts the number past the end.
    """
    cumulative = weights.cumsum(-1)
    end = cumulative[:, -1:]
    limit = torch.minimum(at * end if total else at, end.nextafter(torch.zeros_like(end)))
    index = (cumulative <= limit).sum(-1, keepdim=True)
    before = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp(min=0)), 0.0)
    return index, limit - before


class InverseSampler(LogitsProcessor):
    """A step of transformers' `generate` that draws each next token and makes all others impossible."""

    def __init__(self, uniforms: Tensor, prompt_length: int, rollout: RolloutConfig) -> None:
        self.uniforms, self.prompt_length, self.temperature = uniforms, prompt_length, rollout.temperature
        self.warpers = warpers_of(rollout)
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniforms = self.uniforms[:, input_ids.shape[1] - self.prompt_length]
        token, logprobs = draw(scores, uniforms, temperature=self.temperature, warpers=self.warpers)
        self.logprobs.append(logprobs.unsqueeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, token.unsqueeze(-1), 0.0)
