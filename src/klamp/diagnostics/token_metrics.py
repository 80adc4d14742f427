"""Computes metrics from completions, for records that hold nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch

from klamp.core.estimators import ESTIMATORS
from klamp.diagnostics.history import Completion, History, Row, Side


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
    return {name: value for name, value in found.items() if not math.isnan(value)}


def with_rows(history: History) -> History:
    """The same history, with a row of metrics for every step that has completions and no row of its own.

    Args:
        history: changed in place.
    """
    logged = {row.step for row in history.rows}
    made = [
        Row(step=step, metrics=completion_metrics(completions), prompts=len({each.group for each in completions}))
        for step, completions in history.completions.items()
        if step not in logged
    ]
    history.rows = sorted([*history.rows, *made], key=lambda row: row.step)
    return history
