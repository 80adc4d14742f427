"""The metrics that a record's completions give, without torch; a trainer's: `klamp.hosts.common.step_metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev

from klamp.diagnostics.history import Completion, Row, Side, bounded

UNKNOWN = "?"
"""What stands for a token in records that name none."""


def k3(delta: float) -> float:
    """The estimator k3 of one log-ratio, bounded so that sums of it stay finite."""
    return math.expm1(min(-delta, 600.0)) + delta


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """The metrics that the completions of a step give by themselves, over trained tokens; names as in `METRICS`."""
    found: dict[str, float] = {}
    sides: tuple[tuple[Side, str], ...] = (("ref", "kl"), ("sampler", "sampler"))
    for against, family in sides:
        if deltas := [delta for each in completions for _, delta in each.log_ratios(against)]:
            found |= {f"{family}/k1": fmean(deltas), f"{family}/k3": fmean(map(k3, deltas))}
    rewards = [each.reward for each in completions if each.reward is not None]
    if rewards:
        found["reward"] = fmean(map(bounded, rewards))
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
        groups.setdefault(each.group, []).append((bounded(each.reward), float(sum(each.is_sampled))))
    if len(set(map(len, groups.values()))) != 1 or min(map(len, groups.values())) < 2:
        return {}
    rewards = [[reward for reward, _ in group] for group in groups.values()]
    found = {"reward_std": fmean(map(stdev, rewards)), "groups/saturated": fmean(len({*x}) == 1 for x in rewards)}
    lengths = [[length for _, length in group] for group in groups.values()]
    reward, length = _from_their_means(rewards), _from_their_means(lengths)
    sizes = math.hypot(*reward) * math.hypot(*length)
    if sizes > 1e-6:
        found["length/reward_correlation"] = sum(r * n for r, n in zip(reward, length, strict=True)) / sizes
    return found


def _from_their_means(groups: Sequence[Sequence[float]]) -> list[float]:
    return [value - fmean(group) for group in groups for value in group]


def row_of(step: int, completions: Sequence[Completion]) -> Row:
    """The row of metrics of a step of which the record has completions, and nothing else."""
    return Row(step=step, metrics=completion_metrics(completions), prompts=len({each.group for each in completions}))
