"""A chart: curves as SVG, a legend with their latest values, a table of the numbers, and what the script needs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from klamp.report.axes import Axis, CurveColumn, Series, columns_of, fit, means, spread, thin, ticks
from klamp.report.text import Html, data_table, element, join, rounded, short

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 164
FEW = 15
"""Curves of at most this many points have a dot at each point."""
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
    text: str
    """What the curves say, in a sentence or two."""
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
    """The chart in its frame: title, legend with the latest values, the drawing, a table of the numbers.

    Args:
        chart: what to show.
        most: points of a curve, about; spikes are always kept.
    """
    columns = columns_of(chart.series)
    curves = [column.series.points for column in columns]
    steps = thin(curves, most=most)
    total = len({step for curve in curves for step in curve})
    kept = [replace(column, series=_only(column.series, steps)) for column in columns]
    values = [value for column in kept for value in column.series.points.values()]
    levels = [level for line in chart.lines for level in (line.low, line.high) if level is not None]
    y = fit(values, include=(*chart.include, *levels))
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
            element("span", chart.unit + (", log scale" if y.knee is not None else ""), class_="unit"),
            element("span", at, class_="at"),
        ),
        element("ul", *_legend(chart, kept), class_="legend"),
        element("div", _drawing(chart, kept, x=_across(steps), y=y), class_="plot"),
        element("p", chart.text, class_="says"),
        data_table(headings, rows, caption=f"{chart.title} ({chart.unit}){_thinned(len(steps), total)}"),
        id=chart.name,
        class_="card",
        aria_labelledby=f"{chart.name}-heading",
        data_plot=_plot(chart, kept, y, means(curves, most=most)),
    )


def _plot(chart: Chart, kept: Sequence[CurveColumn], y: Axis, means: Sequence[tuple[float, list[float | None]]]) -> str:
    """What the script draws the chart from, besides its table."""
    series = [{"slot": column.series.slot, "members": column.members, "of": column.of} for column in kept]
    found = {
        "axis": chart.axis,
        "unit": chart.unit,
        "include": [*chart.include],
        "knee": y.knee,
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
    columns = columns_of(chart.series)
    drawn = [column for column in columns if column.of is None]
    parts = [f"{chart.text} {len(drawn)} {'curve' if len(drawn) == 1 else 'curves'}."]
    for column in drawn:
        series, band = column.series, spread(columns, column)
        finite = {step: value for step, value in series.points.items() if math.isfinite(value)}
        if not finite:
            parts.append(f"{series.label}: no finite value.")
            continue
        steps = list(finite)
        first, last, high = steps[0], steps[-1], max(steps, key=lambda step: finite[step])
        parts.append(
            f"{series.label}: {short(finite[first])} at {chart.axis} {short(first)}, {short(finite[last])} at "
            f"{chart.axis} {short(last)}; lowest {short(min(finite.values()))}, highest {short(finite[high])} at "
            f"{chart.axis} {short(high)}."
        )
        lost = len(series.points) - len(finite)
        parts += [f"Its band goes from {short(band[last][0])} to {short(band[last][1])} there."] if band else []
        parts += [f"{lost} values are not finite."] if lost else []
    parts += [f"{line.label}." for line in chart.lines]
    parts += [f"Alarm {mark.number}, {mark.name}, rose at step {mark.step}." for mark in chart.marks]
    return " ".join(parts)


def _drawing(chart: Chart, kept: Sequence[CurveColumn], *, x: Axis, y: Axis) -> Html:
    labelled = f"{chart.name}-title {chart.name}-text"
    return element(
        "svg",
        element("title", chart.title, id=f"{chart.name}-title"),
        element("desc", describe(chart), id=f"{chart.name}-text"),
        _bands(chart.lines, y),
        _axes(x, y),
        _levels(chart.lines, y),
        *(_spread(kept, column, x, y) for column in kept if column.members),
        *(_curve(column.series, x, y) for column in kept if column.of is None),
        *(_mark(mark, x) for mark in chart.marks),
        element("line", class_="cursor", x1=LEFT, x2=LEFT, y1=TOP, y2=BOTTOM),
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=labelled,
        data_low=f"{x.low:.9g}",
        data_high=f"{x.high:.9g}",
    )


def _axes(x: Axis, y: Axis) -> Html:
    parts: list[Html] = []
    for value in ticks(y):
        place = _down(y, value)
        parts.append(element("line", x1=LEFT, x2=RIGHT, y1=place, y2=place, class_="zero" if value == 0 else "rule"))
        parts.append(element("text", short(value), x=LEFT - 6, y=f"{place + 3.5:.1f}", text_anchor="end"))
    for value in filter(float.is_integer, ticks(x)):
        place = _across_at(x, value)
        parts.append(element("text", short(value, digits=6), x=place, y=BOTTOM + 16, text_anchor="middle"))
    return element("g", *parts, class_="axes")


def _bands(lines: Sequence[Line], y: Axis) -> Html:
    parts = [
        element(
            "rect",
            x=LEFT,
            y=_down(y, line.high),
            width=RIGHT - LEFT,
            height=f"{max(1.0, _down(y, line.low) - _down(y, line.high)):.1f}",
            class_="band",
        )
        for line in lines
        if line.high is not None
    ]
    return join(parts)


def _levels(lines: Sequence[Line], y: Axis) -> Html:
    return join(
        element("line", x1=LEFT, x2=RIGHT, y1=_down(y, line.low), y2=_down(y, line.low), class_="level")
        for line in lines
        if line.high is None
    )


def _curve(series: Series, x: Axis, y: Axis) -> Html:
    places = [
        (_across_at(x, step), _down(y, value)) if math.isfinite(value) else None
        for step, value in series.points.items()
    ]
    path, pen = [], False
    for place in places:
        if place is not None:
            path.append(f"{'L' if pen else 'M'}{place[0]:.1f} {place[1]:.1f}")
        pen = place is not None
    around = zip([None, *places], places, [*places[1:], None], strict=False)
    dotted = [b for a, b, c in around if b is not None and (len(places) <= FEW or (a is None and c is None))]
    dots = (element("path", d=shape(series.slot, *place), class_=f"dot s{series.slot % 8}") for place in dotted)
    return join([element("path", d="".join(path), class_=f"curve s{series.slot % 8} d{series.slot % 5}"), *dots])


def _spread(kept: Sequence[CurveColumn], column: CurveColumn, x: Axis, y: Axis) -> Html:
    band = spread(kept, column)
    above = [f"{_across_at(x, step):.1f} {_down(y, high):.1f}" for step, (_, high) in band.items()]
    below = [f"{_across_at(x, step):.1f} {_down(y, low):.1f}" for step, (low, _) in reversed(band.items())]
    return element("path", d=f"M{'L'.join(above + below)}Z", class_=f"spread s{column.series.slot % 8}")


def shape(slot: int, x: float, y: float) -> str:
    """The outline of a dot, by the number of its curve: circle, square, triangle, diamond."""
    if slot % 4 == 0:
        return f"M{x - 3:.1f} {y:.1f}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0Z"
    outlines = ("M{0} {1}h5v5h-5Z", "M{0} {1}l3.4 6h-6.8Z", "M{0} {1}l3.6 3.6l-3.6 3.6l-3.6 -3.6Z")
    offset = ((-2.5, -2.5), (0.0, -3.8), (0.0, -3.6))[slot % 4 - 1]
    return outlines[slot % 4 - 1].format(f"{x + offset[0]:.1f}", f"{y + offset[1]:.1f}")


def _mark(mark: Mark, x: Axis) -> Html:
    place = min(max(_across_at(x, mark.step), LEFT), RIGHT)
    return element(
        "g",
        element("line", x1=place, x2=place, y1=TOP, y2=BOTTOM),
        element("path", d=f"M{place:.1f} {BOTTOM - 5}l4.5 8h-9Z"),
        element("text", str(mark.number), x=f"{place + 4:.1f}", y=TOP + 7),
        class_="mark",
    )


def _across(steps: Sequence[float]) -> Axis:
    low, high = (steps[0], steps[-1]) if steps else (0.0, 1.0)
    return Axis(low=low, high=high) if high > low else Axis(low=low - 1, high=high + 1)


def _across_at(x: Axis, step: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * x(step), 1)


def _down(y: Axis, value: float) -> float:
    place = min(max(y(min(max(value, -1e100), 1e100)), 0.0), 1.0)
    return round(BOTTOM - (BOTTOM - TOP) * place, 1)


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
    few = max(len(kept[number].series.points) for number in numbers) <= FEW
    latest = [list(kept[number].series.points.values())[-1:] or [None] for number in numbers]
    band = list(spread(kept, kept[numbers[0]]).values())
    return element(
        "li",
        key(f"curve s{first.slot % 8} d{first.slot % 5}", shape(first.slot, 11, 5) if few else ""),
        element("span", first.label if len(numbers) == 1 else f"{first.group}, {len(numbers)} runs", class_="label"),
        *(
            element("span", rounded(value, decimals=decimals), class_="value", data_column=number + 1)
            for number, [value] in zip(numbers, latest, strict=True)
        ),
        *([element("span", _span(*band[-1], decimals), class_="span")] if band else []),
    )


def key(classes: str, dot: str = "") -> Html:
    """The small sample of a curve or band in a legend."""
    dots = [element("path", d=dot, class_=f"dot {classes.split()[1]}")] if dot else []
    sample = (
        element("rect", x=0, y=0, width=22, height=10, class_=classes)
        if classes == "band"
        else element("path", d="M0 5H22", class_=classes)
    )
    return element("svg", sample, *dots, class_="key", viewBox="0 0 22 10", aria_hidden="true")


def _span(low: float, high: float, decimals: int | None) -> str:
    """From the lowest to the highest of the values that a mean is of."""
    ends = [rounded(value, decimals=decimals, digits=3) for value in (low, high)]
    return "each" if low == high else " to ".join(ends)


def _thinned(shown: int, total: int) -> str:
    return "" if shown == total else f"; {shown} of {total} logged steps, the extremes among them"
