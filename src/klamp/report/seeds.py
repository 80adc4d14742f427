"""Runs of one configuration with different seeds: their mean, and the band from the lowest to the highest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from klamp.diagnostics.history import bounded


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
    runs: tuple[int, ...] = ()
    """The numbers of the runs that it is from; empty: of none, as by position."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A curve in its place: a column of the chart's table."""

    series: Series
    """The curve; that of a group is its mean."""
    members: tuple[int, ...] = ()
    """Of a mean: the columns of the curves that it is of."""
    of: int | None = None
    """Of a curve in a group: the column of their mean."""


def columns_of(series: Sequence[Series]) -> list[Column]:
    """The curves in the order of a chart's table, each mean before its runs; the first column has number 1.

    Args:
        series: the curves. Those of a group that have no step in common stay by themselves.
    """
    found: list[Column] = []
    for alike in _groups(series):
        points = mean(alike) if len(alike) > 1 else {}
        if not points:
            found += [Column(series=each) for each in alike]
            continue
        at = len(found) + 1
        label = f"{alike[0].group}, mean of {len(alike)}"
        runs = tuple(run for each in alike for run in each.runs)
        middle = Series(label=label, points=points, slot=alike[0].slot, group=alike[0].group, runs=runs)
        found.append(Column(series=middle, members=tuple(range(at + 1, at + 1 + len(alike)))))
        found += [Column(series=each, of=at) for each in alike]
    return found


def mean(alike: Sequence[Series]) -> dict[float, float]:
    """The mean of several curves, at the steps where all of them have a finite value: step -> mean."""
    first, *others = [series.points for series in alike]
    return {
        step: fmean(map(bounded, (value, *(points[step] for points in others))))
        for step, value in first.items()
        if math.isfinite(value) and all(math.isfinite(points.get(step, math.nan)) for points in others)
    }


def spread(columns: Sequence[Column], column: Column) -> dict[float, tuple[float, float]]:
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
