"""Generates completions step by step: each distinct prompt is run once, ended completions leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from klamp.scoring.cache import cache_rows
from klamp.scoring.model_parts import OpenedModel, Traits
from klamp.scoring.passes import distinct, run_prompts

Draw: TypeAlias = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(scores [b, V], which completions [b], position) -> (tokens [b], their log-probabilities [b])."""

DROP_AT = 0.75
"""Ended completions are taken out of the cache once no more than this share of its rows goes on."""


def pays_to_drop(going_on: int, held: int) -> bool:
    """Whether it is worth copying the cache to drop ended completions: not for each one, for copying costs time."""
    return going_on <= DROP_AT * held


def decode(
    model: nn.Module,
    traits: Traits,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    length: int,
    stop: Sequence[int],
    draw: Draw,
) -> tuple[Tensor, Tensor]:
    """Completions and the log-probabilities of their tokens, [B, t], t <= length; arbitrary after an end token.

    What a completion draws depends on its own prompt and tokens alone, so neither the shared prompts nor the batch it
    is in change it, but for rounding.

    Args:
        model: the policy, whose cache can be shared.
        traits: that it can.
        prompt_ids, prompt_mask: left-padded prompts, [B, P].
        length: most tokens of a completion.
        stop: ids that end one.
        draw: takes the next tokens.
    """
    opened, device = OpenedModel(model, traits), prompt_ids.device
    prefix = run_prompts(opened, *distinct(prompt_ids, prompt_mask))
    values, cache = prefix.last[prefix.which], cache_rows(prefix.cache, prefix.which, room=length)
    ends = torch.tensor(list(stop), device=device)
    ids = torch.zeros(len(prompt_ids), length, dtype=torch.long, device=device)
    logprobs = torch.zeros(ids.shape, device=device)
    rows, going = torch.arange(len(ids), device=device), torch.ones(len(ids), dtype=torch.bool, device=device)
    for t in range(length):
        token, logprob = draw(opened.predictions(values[:, -1]).logits(), rows, t)
        ids[rows, t], logprobs[rows, t] = token, logprob.to(logprobs.dtype)
        going &= ~torch.isin(token, ends)
        left = int(going.sum())
        if left == 0 or t + 1 == length:
            return ids[:, : t + 1], logprobs[:, : t + 1]
        if pays_to_drop(left, len(rows)):
            rows, token, cache, going = _without_ended(rows, token, cache, going)
        values, cache = opened.run(token[:, None], prompt_mask[rows], keep=1, cache=cache)
    return ids, logprobs


def _without_ended(rows: Tensor, token: Tensor, cache: Any, going: Tensor) -> tuple[Tensor, Tensor, Any, Tensor]:
    kept = going.nonzero()[:, 0]
    cache.reorder_cache(kept)
    return rows[kept], token[kept], cache, going[kept]
