"""A chart: a legend with the latest values, a table of the numbers, and what the script needs to draw the curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from klamp.report.axes import CurveColumn, Series, columns_of, means, spread, thin
from klamp.report.text import Html, count, data_table, element, rounded, short

DIGITS = 6
"""Significant digits of the numbers in the table, which the script draws from."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A level or band in a chart, to compare the curves with."""

    label: str
    """The name of the level or band."""
    low: float
    """The level, or the lower edge of the band."""
    high: float | None = None
    """The upper edge of the band; None: it is a level."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The mark of an alarm on the axis of steps."""

    step: int
    """The step after which the alarm rose."""
    number: int
    """The number of the alarm on the page."""
    name: str
    """The name of the alarm."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything that one chart shows."""

    name: str
    """The id of the chart, unique on the page; letters, digits and hyphens."""
    title: str
    """The title, in a few words."""
    unit: str
    """The unit of the values."""
    text: str = ""
    """What the curves say besides, if anything."""
    series: Sequence[Series]
    """The curves, at least one."""
    lines: Sequence[Line] = ()
    """The targets and budgets, as levels and bands."""
    marks: Sequence[Mark] = ()
    """The alarms that rose over these metrics."""
    axis: str = "step"
    """What the horizontal axis counts."""
    include: Sequence[float] = ()
    """Values that the vertical axis must have room for."""
    decimals: int | None = None
    """Decimals of the values in the legend; None: as many as four digits need."""


def render_chart(chart: Chart, *, most: int = 400) -> Html:
    """The chart in its frame: title, legend with the latest values, room for the drawing, a table of the numbers.

    Args:
        chart: what to show.
        most: points of a curve, about; spikes are always kept.
    """
    columns = columns_of(chart.series)
    curves = [column.series.points for column in columns]
    steps = thin(curves, most=most)
    total = len({step for curve in curves for step in curve})
    kept = [replace(column, series=_only(column.series, steps)) for column in columns]
    headings = (chart.axis, *(column.series.label for column in kept))
    rows = [
        (short(step, digits=9), *(short(column.series.points.get(step), digits=DIGITS) for column in kept))
        for step in steps
    ]
    at = f"last: {chart.axis} {short(steps[-1], digits=9)}" if steps else ""
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", chart.title, id=f"{chart.name}-heading"),
            element("span", chart.unit, class_="unit"),
            element("span", at, class_="at"),
        ),
        element("ul", *_legend(chart, kept), class_="legend"),
        element("div", _drawing(chart), class_="plot", hidden=True),
        element("p", chart.text, class_="says", hidden=not chart.text),
        data_table(headings, rows, caption=f"{chart.title} ({chart.unit}){_thinned(len(steps), total)}"),
        id=chart.name,
        class_="card",
        aria_labelledby=f"{chart.name}-heading",
        data_plot=_plot(chart, kept, means(curves, most=most)),
    )


def _plot(chart: Chart, kept: Sequence[CurveColumn], means: Sequence[tuple[float, list[float | None]]]) -> str:
    """What the script draws the chart from, besides its table."""
    series = [{"slot": column.series.slot, "members": column.members, "of": column.of} for column in kept]
    found = {
        "axis": chart.axis,
        "unit": chart.unit,
        "include": [*chart.include],
        "decimals": chart.decimals,
        "series": [{name: value for name, value in each.items() if value not in ((), None)} for each in series],
        "lines": [[line.low, line.high] for line in chart.lines],
        "marks": [[mark.step, mark.number] for mark in chart.marks],
        "means": [[_digits(x), *map(_digits, values)] for x, values in means],
    }
    return json.dumps(found, separators=(",", ":"), allow_nan=False)


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def describe(chart: Chart) -> str:
    """The chart in words, for readers who cannot see it."""

    def at(step: float) -> str:
        return f"{chart.axis} {short(step, digits=9)}"

    columns = columns_of(chart.series)
    drawn = [column for column in columns if column.of is None]
    parts = [chart.text] * bool(chart.text) + [f"{count(len(drawn), 'curve')}."]
    for column in drawn:
        series, band = column.series, spread(columns, column)
        finite = {step: value for step, value in series.points.items() if math.isfinite(value)}
        if not finite:
            parts.append(f"{series.label}: no finite value.")
            continue
        steps = list(finite)
        first, last, high = steps[0], steps[-1], max(steps, key=lambda step: finite[step])
        parts.append(
            f"{series.label}: {short(finite[first])} at {at(first)}, {short(finite[last])} at {at(last)}; lowest "
            f"{short(min(finite.values()))}, highest {short(finite[high])} at {at(high)}."
        )
        lost = len(series.points) - len(finite)
        parts += [f"Its band goes from {short(band[last][0])} to {short(band[last][1])} there."] if band else []
        parts += [f"{count(lost, 'value')} not finite."] if lost else []
    parts += [f"{line.label}." for line in chart.lines]
    parts += [f"Alarm {mark.number}, {mark.name}, rose at step {mark.step}." for mark in chart.marks]
    return " ".join(parts)


def _drawing(chart: Chart) -> Html:
    """The picture in words; the script draws the curves, from the table below."""
    return element(
        "svg",
        element("title", chart.title, id=f"{chart.name}-title"),
        element("desc", describe(chart), id=f"{chart.name}-text"),
        class_="chart",
        role="img",
        aria_labelledby=f"{chart.name}-title {chart.name}-text",
    )


def _only(series: Series, steps: Sequence[float]) -> Series:
    points = {step: series.points[step] for step in steps if step in series.points}
    return replace(series, points=points)


def _legend(chart: Chart, kept: Sequence[CurveColumn]) -> list[Html]:
    """The lines of the legend: a mean with the range of its curves, the curves of a group that has none together."""
    lines: dict[str, list[int]] = {}
    for number, column in enumerate(kept):
        if column.of is None:
            alone = column.members or not column.series.group
            lines.setdefault(f"\n{number}" if alone else column.series.group, []).append(number)
    items = [_entry(kept, numbers, chart.decimals) for numbers in lines.values()]
    levels = [(key("level" if line.high is None else "band"), line.label) for line in chart.lines]
    return items + [element("li", swatch, element("span", label, class_="label")) for swatch, label in levels]


def _entry(kept: Sequence[CurveColumn], numbers: Sequence[int], decimals: int | None) -> Html:
    """A line with the latest value of each curve; the script shows those under the cursor in their place."""
    first = kept[numbers[0]].series
    latest = [list(kept[number].series.points.values())[-1:] or [None] for number in numbers]
    band = list(spread(kept, kept[numbers[0]]).values())
    return element(
        "li",
        key(f"curve s{first.slot % 8} d{first.slot % 5}"),
        element("span", first.label if len(numbers) == 1 else f"{first.group}, {len(numbers)} runs", class_="label"),
        *(
            element("span", rounded(value, decimals=decimals), class_="value", data_column=number + 1)
            for number, [value] in zip(numbers, latest, strict=True)
        ),
        *([element("span", _span(*band[-1], decimals), class_="span")] if band else []),
    )


def key(classes: str) -> Html:
    """The small sample of a curve or band in a legend."""
    sample = (
        element("rect", x=0, y=0, width=22, height=10, class_=classes)
        if classes == "band"
        else element("path", d="M0 5H22", class_=classes)
    )
    return element("svg", sample, class_="key", viewBox="0 0 22 10", aria_hidden="true")


def _span(low: float, high: float, decimals: int | None) -> str:
    """From the lowest to the highest of the values that a mean is of."""
    ends = [rounded(value, decimals=decimals, digits=3) for value in (low, high)]
    return "each" if low == high else " to ".join(ends)


def _thinned(shown: int, total: int) -> str:
    return "" if shown == total else f"; {shown} of {total} logged steps, the extremes among them"
