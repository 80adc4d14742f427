"""Axes and curves: the place of a value on an axis, its ticks, which points of a long curve are drawn, and means.

Runs of one configuration with different seeds are drawn as their mean, with a band from the lowest to the highest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from klamp.diagnostics.history import bounded

FAR = 100.0
"""An axis becomes logarithmic away from 0 where the largest value is so many times the upper quartile: else nothing but
it could be seen."""
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Distances between ticks, times powers of ten."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from a lowest to a highest value: linear, or logarithmic above a certain size."""

    low: float
    """The value at the beginning of the axis."""
    high: float
    """The value at the end of the axis; above `low`."""
    knee: float | None = None
    """The size at which the axis bends: linear below, logarithmic above, asinh(value / knee); None: linear."""

    def __call__(self, value: float) -> float:
        """The place of a value, 0 at the beginning and 1 at the end."""
        low, high = self._bend(self.low), self._bend(self.high)
        return (self._bend(value) - low) / (high - low)

    def _bend(self, value: float) -> float:
        return value if self.knee is None else math.asinh(value / self.knee)


def fit(values: Sequence[float], *, include: Sequence[float] = ()) -> Axis:
    """The axis that has room for all of these values.

    Args:
        values: what is drawn; what is not finite is passed over.
        include: values that must be on the axis too.
    """
    finite = [bounded(value) for value in values if math.isfinite(value)]
    shown = [*finite, *include] or [0.0, 1.0]
    low, high = min(shown), max(shown)
    sizes = [abs(value) for value in finite if value != 0]
    usual = sorted(sizes)[3 * len(sizes) // 4] if len(sizes) > 3 else math.inf
    least = max(map(abs, include), default=0.0)
    far = max(sizes, default=0.0) > max(FAR * usual, least)
    knee = usual / 2 if far else None
    if knee is not None:
        return Axis(low=low, high=high, knee=knee)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 1.0
        return Axis(low=min(low, 0.0) if low >= 0 else low - margin, high=high + margin)
    margin = 0.05 * (high - low)
    return Axis(low=low - margin if low < 0 else max(0.0, low - margin), high=high + margin)


def ticks(scale: Axis, *, most: int = 5) -> list[float]:
    """Round values to label an axis with.

    Args:
        scale: the axis.
        most: how many at most, about.
    """
    if scale.knee is not None:
        return _decades(scale, most)
    least = (scale.high - scale.low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in STEPS if factor * power >= least * (1 - 1e-9))
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _decades(scale: Axis, most: int) -> list[float]:
    assert scale.knee is not None
    largest = max(abs(scale.low), abs(scale.high))
    first, last = math.ceil(math.log10(scale.knee)), math.floor(math.log10(largest))
    every = max(1, math.ceil((last - first + 1) / max(1, most - 1)))
    sizes = [10.0**power for power in range(last, first - 1, -every)][::-1]
    found = [*(-size for size in reversed(sizes)), 0.0, *sizes]
    return [value for value in found if scale.low <= value <= scale.high]


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
