"""Completions with their prompts, as tensors, and forward passes over them with little padding.

Each completion runs with its prompt, or each distinct prompt runs once and the completions on its keys and values,
differentiable through them: two ways, the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from klamp.scoring.model_parts import OpenedModel, cache_rows

PASS_TOKENS = 256
"""What one more forward pass costs, in tokens: its launches, and products too small to fill the machine."""


@dataclass(frozen=True, kw_only=True)
class Completions:
    """B sampled completions [B, T], padded on the right, with their prompts [B, P], padded on the left."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    """1 on tokens, 0 on padding."""
    ids: Tensor
    mask: Tensor
    """[B, T] bool; True up to and including the end token."""
    sampler_logprobs: Tensor
    """[B, T] log-probability of each token under the distribution it was drawn from; 0 where masked."""
    ended: Tensor
    """[B] bool; False where the length limit cut the completion."""

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The completions as text, without special tokens."""
        return tokenizer.batch_decode(kept_ids(self.ids, self.mask), skip_special_tokens=True)


def kept_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The ids of each row without its padding."""
    return [row[tokens.bool()].tolist() for row, tokens in zip(ids, mask, strict=True)]


def select(completions: Completions, rows: Tensor | slice) -> Completions:
    """Some of the completions; positions that are padding in all of them are cut off."""
    mask = completions.mask[rows]
    length = max(1, int(mask.any(0).long().sum()))
    prompt_ids, prompt_mask = without_padding(completions.prompt_ids[rows], completions.prompt_mask[rows])
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=completions.ids[rows, :length],
        mask=mask[:, :length],
        sampler_logprobs=completions.sampler_logprobs[rows, :length],
        ended=completions.ended[rows],
    )


def without_padding(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask, without the columns that are padding in all of them."""
    first = int((mask.sum(0) == 0).long().sum())
    return ids[:, first:], mask[:, first:]


class PassPlan(NamedTuple):
    """How completions are divided into forward passes."""

    shared: bool
    """Whether each distinct prompt is run once, before the completions."""
    buckets: list[list[int]]
    """The rows of each pass over completions; each row in one of them."""


def bucketed(lengths: Sequence[int], *, ahead: int, overhead: int) -> tuple[list[list[int]], int]:
    """Groups rows of similar length so that padding and passes together cost least: the rows of each, and the cost.

    Equation: minimise sum over buckets of (rows * (ahead + longest) + overhead); exact, by dynamic programming over
    the distinct lengths, longest first.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    starts = [i for i, row in enumerate(order) if i == 0 or lengths[row] != lengths[order[i - 1]]]
    ends = [*starts[1:], len(order)] if starts else []
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for end in ends:
        best[end] = min((best[a][0] + (end - a) * (ahead + lengths[order[a]]) + overhead, a) for a in starts if a < end)
    buckets, end = [], len(order)
    while end:
        start = best[end][1]
        buckets.append(sorted(order[start:end]))
        end = start
    return buckets[::-1], best[len(order)][0]


def plan_of(lengths: Sequence[int], *, prompts: int, prompt_length: int, can_share: bool) -> PassPlan:
    """The cheaper of two plans: each completion with its prompt, or prompts once and completions on their cache.

    A completion's last token predicts nothing that is asked for and is not run.
    """
    inputs = [max(0, n - 1) for n in lengths]
    plain, plain_cost = bucketed(inputs, ahead=prompt_length, overhead=PASS_TOKENS)
    if can_share:
        shared, cost = bucketed(inputs, ahead=0, overhead=PASS_TOKENS)
        cost += prompts * prompt_length + PASS_TOKENS
        if cost < plain_cost:
            return PassPlan(shared=True, buckets=shared)
    return PassPlan(shared=False, buckets=plain)


class Prefix(NamedTuple):
    """Prompts that were run once, with their cache; `which` [B] is the number of each row's prompt."""

    last: Tensor
    """[U, 1, H or V] predictions at the end of the prompts."""
    cache: object
    which: Tensor


def distinct(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct prompts among B left-padded ones: ids and mask [U, P], and the number of each row's prompt [B]."""
    both, which = torch.cat([ids, mask.to(ids.dtype)], dim=1).unique(dim=0, return_inverse=True)
    return both[:, : ids.shape[1]], both[:, ids.shape[1] :], which


def run_prompts(opened: OpenedModel, ids: Tensor, mask: Tensor, which: Tensor) -> Prefix:
    """Run distinct prompts, [U, P] each, and keep their keys and values."""
    last, cache = opened.run(ids, mask, keep=1, use_cache=True)
    return Prefix(last=last, cache=cache, which=which)


def run_rows(
    opened: OpenedModel, completions: Completions, rows: Tensor, *, can_share: bool, plan: PassPlan | None = None
) -> tuple[Tensor, Tensor]:
    """The model's predictions at every unmasked token of some completions; with gradient where that is enabled.

    Returns values [n, H or V], and the place of each in the flattened [B * T] tokens; without a plan, by the cheapest.
    """
    ids, prompt_mask = without_padding(completions.prompt_ids[rows], completions.prompt_mask[rows])
    unique_ids, unique_mask, which = distinct(ids, prompt_mask)
    if plan is None:
        lengths = completions.mask[rows].sum(-1).tolist()
        plan = plan_of(lengths, prompts=len(unique_ids), prompt_length=ids.shape[1], can_share=can_share)
        if not opened.is_steady(ids.shape[1] + max(lengths)):  # one pass, since its longest row is in all of them
            plan = PassPlan(shared=False, buckets=[list(range(len(rows)))])
    prefix = run_prompts(opened, unique_ids, unique_mask, which) if plan.shared else None
    places = torch.arange(completions.ids.numel(), device=ids.device).view(completions.ids.shape)
    values, where = [], []
    for bucket in plan.buckets:
        at = torch.tensor(bucket, device=ids.device)
        mask = completions.mask[rows[at]]
        length = max(1, int(mask.sum(-1).max()))
        tokens = completions.ids[rows[at], :length]
        if prefix is None:
            predicted = _plain(opened, ids[at], prompt_mask[at], tokens)
        else:
            predicted = _on_prefix(opened, prompt_mask[at], tokens, prefix, which[at])
        unmasked = mask[:, :length].flatten().nonzero()[:, 0]
        values.append(predicted.flatten(0, 1).index_select(0, unmasked))
        where.append(places[rows[at], :length].flatten()[unmasked])
    return torch.cat(values), torch.cat(where)


def _plain(opened: OpenedModel, prompt_ids: Tensor, prompt_mask: Tensor, tokens: Tensor) -> Tensor:
    """Run prompts and completions together, one row each: predictions [b, t, ...]."""
    prompt_ids, prompt_mask = without_padding(prompt_ids, prompt_mask)
    return opened.run(torch.cat([prompt_ids, tokens[:, :-1]], dim=1), prompt_mask, keep=tokens.shape[1])[0]


def _on_prefix(opened: OpenedModel, prompt_mask: Tensor, tokens: Tensor, prefix: Prefix, which: Tensor) -> Tensor:
    """Run completions on the cache of their prompts: predictions [b, t, ...], the first from the prompt itself."""
    first = prefix.last.index_select(0, which)
    if tokens.shape[1] == 1:
        return first
    cache = cache_rows(prefix.cache, which)
    later, _ = opened.run(tokens[:, :-1], prompt_mask, keep=tokens.shape[1] - 1, cache=cache)
    return torch.cat([first, later], dim=1)
