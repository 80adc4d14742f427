"""Sampling and scoring in the stand-in; log-probabilities are those of the model itself, at temperature 1.

So are those of the hosted service, whatever the sampling parameters:
https://github.com/thinking-machines-lab/tinker-feedback/issues/148
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from klamp_standin.protocol import Refused

DEFAULT_LENGTH = 64
EMPTY = -99999.0
"""The log-probability, of token 0, where there is none."""
Sampled = tuple[list[int], list[float], bool]
"""The tokens of a completion, their log-probabilities, and whether it ended by itself."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are sampled: temperature, truncation, length, stops, seed."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop_ids: frozenset[int]
    stop_texts: tuple[str, ...]
    seed: int

    @classmethod
    def read(cls, given: dict[str, Any], *, end: Sequence[int], seed: int, longest: int) -> SamplingParams:
        """Read the parameters of a request; `end` are the model's end tokens, `seed` the default seed."""
        stop = given.get("stop")
        listed = [stop] if isinstance(stop, str) else list(stop or [])
        ids = frozenset(end) if stop is None else frozenset(x for x in listed if isinstance(x, int))
        texts = tuple(x for x in listed if isinstance(x, str))
        params = cls(
            max_tokens=given.get("max_tokens") or min(DEFAULT_LENGTH, longest),
            temperature=float(given.get("temperature", 1.0)),
            top_k=int(given.get("top_k", -1)),
            top_p=float(given.get("top_p", 1.0)),
            stop_ids=ids | frozenset(end if texts else ()),
            stop_texts=texts,
            seed=seed if given.get("seed") is None else int(given["seed"]),
        )
        if not 1 <= params.max_tokens <= longest:
            raise Refused(f"max_tokens is {params.max_tokens}; the model has room for {longest} after this prompt")
        if params.temperature < 0 or not 0 < params.top_p <= 1:
            raise Refused(f"temperature {params.temperature} and top_p {params.top_p}: need >= 0 and (0, 1]")
        return params


@torch.no_grad()
def read(model: nn.Module, tokens: Sequence[int]) -> Any:
    """Run the model over a prompt, and keep the keys and values."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=True)


def prompt_logprobs(logits: Tensor, tokens: Sequence[int], last: int | None) -> list[float]:
    """The log-probability of each prompt token after those before it; NaN at index 0 and before the `last` ones.

    Args:
        logits: [P, V] after each token of the prompt.
        tokens: the prompt.
        last: how many to score; None: all.
    """
    logits = logits[:-1]
    goals = torch.tensor(list(tokens[1:]))
    found = [float("nan"), *logits.log_softmax(-1).gather(-1, goals[:, None]).squeeze(-1).tolist()]
    return found if last is None else [float("nan")] * (len(found) - last) + found[-last:]


def top_prompt_logprobs(logits: Tensor, k: int, last: int | None) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens at each position of a prompt, and their log-probabilities, [P, k] each.

    Args:
        logits: [P, V] after each token of the prompt; none stands before the first.
        k: how many; of a smaller vocabulary all.
        last: how many positions to score; None: all.
    """
    found = logits.log_softmax(-1).topk(min(k, logits.shape[-1]))
    ids, logprobs = torch.zeros(len(logits), k, dtype=torch.long), torch.full((len(logits), k), EMPTY)
    first, count = len(logits) - last if last else 1, found.indices.shape[1]
    ids[first:, :count], logprobs[first:, :count] = (x[first - 1 : -1] for x in (found.indices, found.values))
    return ids, logprobs


@torch.no_grad()
def sample(
    model: nn.Module, out: Any, count: int, params: SamplingParams, decode: Callable[[list[int]], str]
) -> list[Sampled]:
    """Sample `count` completions of a prompt; equal seeds give equal completions.

    Args:
        model: any causal LM.
        out: its pass over the prompt.
        count: how many.
        params: how they are drawn.
        decode: ids -> text, for stop strings.
    """
    generator = torch.Generator().manual_seed(params.seed % 2**63)
    uniforms = torch.rand(count, params.max_tokens, generator=generator, dtype=torch.float64)
    last, cache = out.logits[:, -1].expand(count, -1), out.past_key_values
    if count > 1 and params.max_tokens > 1:
        cache.batch_repeat_interleave(count)
    rows: list[Sampled] = [([], [], False) for _ in range(count)]
    for position in range(params.max_tokens):
        logprobs = last.log_softmax(-1)
        drawn = _draw(logprobs, uniforms[:, position : position + 1], params)
        chosen = logprobs.gather(-1, drawn)
        rows = [
            _extended(*row, int(t), float(p), params, decode) for row, t, p in zip(rows, drawn, chosen, strict=True)
        ]
        if all(ended for *_, ended in rows):
            break
        if position + 1 < params.max_tokens:
            last = model(input_ids=drawn, past_key_values=cache, use_cache=True).logits[:, -1]
    return rows


def _draw(logprobs: Tensor, uniform: Tensor, params: SamplingParams) -> Tensor:
    """The next token of each row, [n, 1], drawn by a uniform number through the cumulative distribution."""
    if params.temperature == 0:
        return logprobs.argmax(-1, keepdim=True)
    warpers = LogitsProcessorList()
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    no_ids = torch.empty(len(logprobs), 0, dtype=torch.long)
    warped: Tensor = warpers(no_ids, logprobs / params.temperature)  # pyright: ignore[reportArgumentType]
    cumulative = warped.softmax(-1).double().cumsum(-1)
    limit = torch.minimum(uniform * cumulative[:, -1:], cumulative[:, -1:].nextafter(torch.zeros_like(uniform)))
    return (cumulative <= limit).sum(-1, keepdim=True)


def _extended(
    tokens: list[int],
    logprobs: list[float],
    ended: bool,
    token: int,
    logprob: float,
    params: SamplingParams,
    decode: Callable[[list[int]], str],
) -> Sampled:
    """A sequence with one more token, unless it has ended."""
    if ended:
        return tokens, logprobs, ended
    tokens, logprobs = [*tokens, token], [*logprobs, logprob]
    text = decode(tokens) if params.stop_texts else ""
    return tokens, logprobs, token in params.stop_ids or any(stop in text for stop in params.stop_texts)
