"""A chart: a legend with the latest values, a table of the numbers, and what the script needs to draw the curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from klamp.report.text import Html, count, data_table, element, rounded, short

DIGITS = 6
"""Significant digits of the numbers in the table, which the script draws from."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve of a chart."""

    label: str
    points: Mapping[float, float]
    """Step -> value, in the order of steps; NaN and infinities are gaps."""
    slot: int = 0
    """Its colour, its dashes and the shape of its dots, by number."""
    group: str = ""
    """Curves of one group share a line of the legend; empty: the curve has its own."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A level or band in a chart, to compare the curves with."""

    label: str
    low: float
    """The level, or the lower edge of the band."""
    high: float | None = None
    """The upper edge of the band; None: it is a level."""


class Mark(NamedTuple):
    """The mark of an alarm on the axis of steps: the step after which it rose, its number on the page, its name."""

    step: int
    number: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything that one chart shows."""

    name: str
    """The id of the chart, unique on the page; letters, digits and hyphens."""
    title: str
    unit: str
    curves: Mapping[str, str]
    """Metric -> its label, the most important first."""
    include: Sequence[float] = (0.0,)
    """Values that the vertical axis must have room for."""
    decimals: int | None = None
    """Decimals of the values in the legend; None: as many as four digits need."""
    text: str = ""
    series: Sequence[Series] = ()
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()


def render_chart(chart: Chart, *, most: int = 400) -> Html:
    """The chart in its frame: title, legend with the latest values, room for the drawing, a table of the numbers."""
    curves = [series.points for series in chart.series]
    steps = thin(curves, most=most)
    total = len({step for curve in curves for step in curve})
    headings = ("step", *(series.label for series in chart.series))
    rows = [(short(step, digits=9), *(short(curve.get(step), digits=DIGITS) for curve in curves)) for step in steps]
    thinned = "" if len(steps) == total else f"; {len(steps)} of {total} logged steps, the extremes among them"
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", chart.title, id=f"{chart.name}-heading"),
            element("span", chart.unit, class_="unit"),
            element("span", f"last: step {short(steps[-1], digits=9)}" if steps else "", class_="at"),
        ),
        element("ul", *_legend(chart), class_="legend"),
        element("div", _drawing(chart), class_="plot", hidden=True),
        element("p", chart.text, class_="says", hidden=not chart.text),
        data_table(headings, rows, caption=f"{chart.title} ({chart.unit}){thinned}"),
        id=chart.name,
        class_="card",
        aria_labelledby=f"{chart.name}-heading",
        data_plot=_plot(chart),
    )


def _plot(chart: Chart) -> str:
    """What the script draws the chart from, besides its table."""
    found = {
        "unit": chart.unit,
        "include": [*chart.include],
        "decimals": chart.decimals,
        "slots": [series.slot for series in chart.series],
        "lines": [[line.low, line.high] for line in chart.lines],
        "marks": [mark[:2] for mark in chart.marks],
    }
    return json.dumps(found, separators=(",", ":"), allow_nan=False)


def thin(curves: Sequence[Mapping[float, float]], *, most: int) -> list[float]:
    """The steps to draw: all of them, or for long curves those with the extremes of each stretch."""
    steps = sorted({step for curve in curves for step in curve})
    if len(steps) <= most:
        return steps
    kept = {steps[0], steps[-1]}
    size = math.ceil(len(steps) / max(1, most // (2 * len(curves))))
    for start in range(0, len(steps), size):
        for curve in curves:
            held = [step for step in steps[start : start + size] if step in curve]
            finite = [step for step in held if math.isfinite(curve[step])]
            if finite:
                kept |= {min(finite, key=lambda s: curve[s]), max(finite, key=lambda s: curve[s])}
            kept |= set(held) - set(finite)
    return sorted(kept)


def describe(chart: Chart) -> str:
    """The chart in words, for readers who cannot see it."""
    parts = [chart.text] * bool(chart.text) + [f"{count(len(chart.series), 'curve')}."]
    for series in chart.series:
        finite = {step: value for step, value in series.points.items() if math.isfinite(value)}
        if not finite:
            parts.append(f"{series.label}: no finite value.")
            continue
        low, high = (pick(finite, key=lambda step: finite[step]) for pick in (min, max))
        ends = [f"{short(finite[step])} at step {short(step, digits=9)}" for step in (min(finite), max(finite), high)]
        parts.append(f"{series.label}: {ends[0]}, {ends[1]}; lowest {short(finite[low])}, highest {ends[2]}.")
        lost = len(series.points) - len(finite)
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


def _legend(chart: Chart) -> list[Html]:
    """The lines of the legend: one per curve or group of curves, one per level."""
    lines: dict[str, list[Series]] = {}
    for number, series in enumerate(chart.series):
        lines.setdefault(series.group or f"\n{number}", []).append(series)
    levels = [(key("level" if line.high is None else "band"), line.label) for line in chart.lines]
    return [
        *(_entry(group, chart.decimals) for group in lines.values()),
        *(element("li", swatch, element("span", label, class_="label")) for swatch, label in levels),
    ]


def _entry(group: Sequence[Series], decimals: int | None) -> Html:
    first = group[0]
    latest = [[*series.points.values()][-1] for series in group if series.points]
    return element(
        "li",
        key(f"curve s{first.slot % 8} d{first.slot % 5}"),
        element("span", first.label if len(group) == 1 else f"{first.group}, {len(group)} runs", class_="label"),
        *(element("span", rounded(value, decimals=decimals), class_="value") for value in latest),
    )


def key(classes: str) -> Html:
    """The small sample of a curve or band in a legend."""
    sample = (
        element("rect", x=0, y=0, width=22, height=10, class_=classes)
        if classes == "band"
        else element("path", d="M0 5H22", class_=classes)
    )
    return element("svg", sample, class_="key", viewBox="0 0 22 10", aria_hidden="true")
