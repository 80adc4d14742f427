"""Computes metrics from completions, for records that hold nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch

from klamp.core.estimators import ESTIMATORS
from klamp.diagnostics.history import Completion, Row, Side
from klamp.diagnostics.statistics import group_metrics

UNKNOWN = "?"
"""What stands for a token in records that name none."""


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """The metrics that a step's completions give by themselves, over trained tokens; names as in `METRICS`.

    Args:
        completions: those of one step.
    """
    found: dict[str, float] = {}
    sides: tuple[tuple[Side, str], ...] = (("ref", "kl"), ("sampler", "sampler"))
    for against, family in sides:
        deltas = torch.tensor([d for each in completions for _, d in each.log_ratios(against)], dtype=torch.float64)
        if deltas.numel():
            found |= {f"{family}/{name}": float(ESTIMATORS[name].value(deltas).mean()) for name in ("k1", "k3")}
    rewards = [each.reward for each in completions if each.reward is not None]
    if rewards:
        found["reward"] = fmean(rewards)
    ended = [each.ended for each in completions if each.ended is not None]
    if ended:
        found["length/truncated"] = 1 - fmean(ended)
    lengths = [sum(each.is_sampled) for each in completions]
    if lengths:
        found["length/mean"] = fmean(lengths)
        found["length/repeated"] = sum(map(_repeated, completions)) / max(sum(lengths), 1)
    found |= _group_metrics(completions)
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _repeated(completion: Completion) -> int:
    """How many of the tokens that the model wrote stand in a pair of neighbours that was there before."""
    written = [token for token, sampled in zip(completion.tokens, completion.is_sampled, strict=True) if sampled]
    pairs = list(pairwise(written)) if any(token != UNKNOWN for token in written) else []
    return len(pairs) - len(set(pairs))


def _group_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """What rewards say within groups, where every group is named, is whole, and has two completions or more."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for each in completions:
        if each.reward is None or not each.group:
            return {}
        groups.setdefault(each.group, []).append((each.reward, float(sum(each.is_sampled))))
    sizes = {len(group) for group in groups.values()}
    if len(sizes) != 1 or min(sizes) < 2:
        return {}
    size = sizes.pop()
    rewards, lengths = torch.tensor([pair for group in groups.values() for pair in group], dtype=torch.float64).unbind(
        -1
    )
    return {name: float(value) for name, value in group_metrics(rewards, lengths, size).items()}


def row_of(step: int, completions: Sequence[Completion]) -> Row:
    """The row of metrics of a step that the record has completions of, and nothing else.

    Args:
        step: the step.
        completions: those that were written in it.
    """
    return Row(step=step, metrics=completion_metrics(completions), prompts=len({each.group for each in completions}))
