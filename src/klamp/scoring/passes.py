"""Plans forward passes over completions with little padding, each with its prompt, or each distinct prompt run once
and the completions on its keys and values, differentiable through them: two ways, the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import OpenedModel, cache_rows

PASS_TOKENS = 256
"""What one more forward pass costs, in tokens: its launches, and products too small to fill the machine."""


@dataclass(frozen=True, kw_only=True)
class PassPlan:
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


@dataclass(frozen=True, kw_only=True)
class Prefix:
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
    prompt_mask = completions.prompt_mask[rows]
    first = int((prompt_mask.sum(0) == 0).long().sum())  # columns that are padding in all of them
    ids, prompt_mask = completions.prompt_ids[rows, first:], prompt_mask[:, first:]
    unique_ids, unique_mask, which = distinct(ids, prompt_mask)
    if plan is None:
        lengths = completions.mask[rows].sum(-1).tolist()
        plan = plan_of(lengths, prompts=len(unique_ids), prompt_length=ids.shape[1], can_share=can_share)
        if not opened.is_steady(ids.shape[1] + max(lengths)):  # one pass, since its longest row is in all of them
            plan = PassPlan(shared=False, buckets=[list(range(len(rows)))])
    prefix = run_prompts(opened, unique_ids, unique_mask, which) if plan.shared else None
    places = torch.arange(completions.ids.numel(), device=ids.device).view(completions.ids.shape)
    values, found = [], []
    for bucket in plan.buckets:
        at = torch.tensor(bucket, device=ids.device)
        mask = completions.mask[rows[at]]
        length = max(1, int(mask.sum(-1).max()))
        tokens = completions.ids[rows[at], :length]
        if prefix is None:
            seen = _plain(opened, ids[at], prompt_mask[at], tokens)
        else:
            seen = _on_prefix(opened, prompt_mask[at], tokens, prefix, which[at])
        kept = mask[:, :length].flatten().nonzero()[:, 0]
        values.append(seen.flatten(0, 1).index_select(0, kept))
        found.append(places[rows[at], :length].flatten()[kept])
    return torch.cat(values), torch.cat(found)


def _plain(opened: OpenedModel, prompt_ids: Tensor, prompt_mask: Tensor, tokens: Tensor) -> Tensor:
    """Run prompts and completions together, one row each: predictions [b, t, ...]."""
    first = int((prompt_mask.sum(0) == 0).long().sum())
    ids = torch.cat([prompt_ids[:, first:], tokens[:, :-1]], dim=1)
    return opened.run(ids, prompt_mask[:, first:], keep=tokens.shape[1])[0]


def _on_prefix(opened: OpenedModel, prompt_mask: Tensor, tokens: Tensor, prefix: Prefix, which: Tensor) -> Tensor:
    """Run completions on the cache of their prompts: predictions [b, t, ...], the first from the prompt itself."""
    first = prefix.last.index_select(0, which)
    if tokens.shape[1] == 1:
        return first
    cache = cache_rows(prefix.cache, which)
    later, _ = opened.run(tokens[:, :-1], prompt_mask, keep=tokens.shape[1] - 1, cache=cache)
    return torch.cat([first, later], dim=1)
