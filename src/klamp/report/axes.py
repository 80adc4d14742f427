"""Curves: which points of a long one are drawn, the means that a smoothed one goes through, and those of a group.

Runs of one configuration with different seeds are drawn as their mean, with a band from the lowest to the highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from klamp.diagnostics.history import bounded

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


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    """The name of the curve in the legend."""
    points: Mapping[float, float]
    """Step -> value, in the order of steps; NaN and infinities are gaps."""
    slot: int = 0
    """Its colour, its dashes and the shape of its dots, by number."""
    group: str = ""
    """Curves of one group are drawn as their mean with a band, and share a line of the legend; empty: by itself."""


@dataclass(frozen=True, kw_only=True)
class CurveColumn:
    """A curve in its place: a column of the chart's table."""

    series: Series
    """The curve; that of a group is its mean."""
    members: tuple[int, ...] = ()
    """Of a mean: the columns of the curves that it is of."""
    of: int | None = None
    """Of a curve in a group: the column of their mean."""


def columns_of(series: Sequence[Series]) -> list[CurveColumn]:
    """The curves in the order of a chart's table, each mean before its runs; the first column has number 1.

    Args:
        series: the curves. Those of a group that have no step in common stay by themselves.
    """
    found: list[CurveColumn] = []
    for alike in _groups(series):
        points = mean(alike) if len(alike) > 1 else {}
        if not points:
            found += [CurveColumn(series=each) for each in alike]
            continue
        at = len(found) + 1
        label = f"{alike[0].group}, mean of {len(alike)}"
        middle = Series(label=label, points=points, slot=alike[0].slot, group=alike[0].group)
        found.append(CurveColumn(series=middle, members=tuple(range(at + 1, at + 1 + len(alike)))))
        found += [CurveColumn(series=each, of=at) for each in alike]
    return found


def mean(alike: Sequence[Series]) -> dict[float, float]:
    """The mean of several curves, at the steps where all of them have a finite value: step -> mean."""
    first, *others = [series.points for series in alike]
    return {
        step: fmean(map(bounded, (value, *(points[step] for points in others))))
        for step, value in first.items()
        if math.isfinite(value) and all(math.isfinite(points.get(step, math.nan)) for points in others)
    }


def spread(columns: Sequence[CurveColumn], column: CurveColumn) -> dict[float, tuple[float, float]]:
    """The lowest and the highest value of a mean's curves: step -> (lowest, highest).

    Args:
        columns: all of the chart.
        column: that of the mean.
    """
    curves = [columns[number - 1].series.points for number in column.members]
    found: dict[float, tuple[float, float]] = {}
    for step in column.series.points if curves else ():
        values = [points[step] for points in curves if step in points]
        found[step] = min(values), max(values)
    return found


def _groups(series: Sequence[Series]) -> Iterator[list[Series]]:
    groups: dict[str, list[Series]] = {}
    for number, each in enumerate(series):
        groups.setdefault(each.group or f"\n{number}", []).append(each)
    yield from groups.values()
