"""Makes long curves short: fewer points, but every spike stays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

Curve = Mapping[float, float]
"""Step -> value."""


def thin(curves: Sequence[Curve], *, most: int) -> list[float]:
    """The steps to draw: all of them, or for long curves those with the extremes of each stretch.

    Args:
        curves: step -> value.
        most: points of a curve, about.
    """
    steps = sorted({step for curve in curves for step in curve})
    if len(steps) <= most:
        return steps
    kept = {steps[0], steps[-1]}
    for stretch in _stretches(steps, most // (2 * max(1, len(curves)))):
        for curve in curves:
            held = [step for step in stretch if step in curve]
            if held:
                kept |= {min(held, key=lambda s: _order(curve[s])), max(held, key=lambda s: _order(curve[s]))}
                kept |= {step for step in held if not math.isfinite(curve[step])}
    return sorted(kept)


def means(curves: Sequence[Curve], *, most: int) -> list[tuple[float, list[float | None]]]:
    """What a smoothed curve goes through where `thin` keeps extremes only: (middle of a stretch, mean of each curve).

    Args:
        curves: step -> value; what is not finite is passed over.
        most: as for `thin`; empty where it keeps every step.
    """
    steps = sorted({step for curve in curves for step in curve})
    if len(steps) <= most:
        return []
    found: list[tuple[float, list[float | None]]] = []
    for stretch in _stretches(steps, most // 2):
        held = [
            [_order(curve[step]) for step in stretch if math.isfinite(curve.get(step, math.nan))] for curve in curves
        ]
        found.append((fmean(stretch), [fmean(values) if values else None for values in held]))
    return found


def _stretches(steps: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    size = math.ceil(len(steps) / max(1, count))
    for start in range(0, len(steps), size):
        yield steps[start : start + size]


def _order(value: float) -> float:
    return min(max(value, -1e100), 1e100) if math.isfinite(value) else 0.0
