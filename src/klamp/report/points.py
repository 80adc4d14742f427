"""Makes long curves short: fewer points, but every spike stays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    size = math.ceil(len(steps) / max(1, most // (2 * max(1, len(curves)))))
    kept = {steps[0], steps[-1]}
    for start in range(0, len(steps), size):
        stretch = steps[start : start + size]
        for curve in curves:
            held = [step for step in stretch if step in curve]
            if held:
                kept |= {min(held, key=lambda s: _order(curve[s])), max(held, key=lambda s: _order(curve[s]))}
                kept |= {step for step in held if not math.isfinite(curve[step])}
    return sorted(kept)


def _order(value: float) -> float:
    return value if math.isfinite(value) else 0.0
