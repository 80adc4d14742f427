"""A heatmap: a value over steps and rows as shaded cells, with the numbers in a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from klamp.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from klamp.report.figure import Entry, data_table, figure, key
from klamp.report.markup import Html, element
from klamp.report.numerals import short
from klamp.report.points import thin

COLUMNS = 60
LEVELS = 6
LOWEST = 1e-4
"""A KL below this is shown as none."""


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """Everything that one heatmap shows."""

    name: str
    """The id of the heatmap, unique on the page."""
    title: str
    """The title, in a few words."""
    unit: str
    """The unit of the values."""
    text: str
    """What the heatmap says, in a sentence or two."""
    rows: Mapping[str, Mapping[float, float]]
    """Label of the row -> step -> value, the lowest row first."""


def render_heatmap(heatmap: Heatmap) -> Html:
    """The heatmap with its legend and its table.

    Args:
        heatmap: what to show.
    """
    steps = thin(list(heatmap.rows.values()), most=10**9)
    every = max(1, math.ceil(len(steps) / COLUMNS))
    shown = steps[::every]
    edges = edges_of([v for row in heatmap.rows.values() for step, v in row.items() if step in set(shown)])
    rows = [(short(s, digits=9), *(short(row.get(s), digits=4) for row in heatmap.rows.values())) for s in shown]
    entries = [Entry(swatch=key(f"q{level}"), label=_range(edges, level)) for level in range(len(edges) + 1)]
    return figure(
        name=heatmap.name,
        title=heatmap.title,
        unit=heatmap.unit,
        text=heatmap.text,
        drawing=_drawing(heatmap, shown, edges),
        entries=entries,
        at="",
        legend="steps",
        table=data_table(("step", *heatmap.rows), rows, caption=f"{heatmap.title} ({heatmap.unit})"),
    )


def edges_of(values: Sequence[float]) -> list[float]:
    """The values between which each shade lies, evenly spaced on a logarithmic axis up to the largest value."""
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    if top <= LOWEST:
        return [LOWEST]
    low = max(LOWEST, top / 10 ** (LEVELS / 2))
    return [float(f"{low * (top / low) ** (i / LEVELS):.2g}") for i in range(LEVELS)]


def level_of(value: float, edges: Sequence[float]) -> int:
    """The number of the shade for a value, 0 for the lightest."""
    return sum(value >= edge for edge in edges)


def _range(edges: Sequence[float], level: int) -> str:
    if level == 0:
        return "below"
    return f"{short(edges[level - 1])}" + ("+" if level == len(edges) else "")


def _drawing(heatmap: Heatmap, steps: Sequence[float], edges: Sequence[float]) -> Html:
    height, width = (BOTTOM - TOP) / len(heatmap.rows), (RIGHT - LEFT) / max(1, len(steps))
    parts: list[Html] = []
    for number, (label, row) in enumerate(heatmap.rows.items()):
        y = BOTTOM - (number + 1) * height
        parts.append(element("text", _place(label), x=LEFT - 6, y=f"{y + height / 2 + 3.5:.1f}", text_anchor="end"))
        for column, step in enumerate(steps):
            value = row.get(step, math.nan)
            if not math.isnan(value):
                parts.append(
                    element(
                        "rect",
                        element("title", f"step {short(step, digits=9)}, {label}: {short(value)}"),
                        x=f"{LEFT + column * width:.1f}",
                        y=f"{y:.1f}",
                        width=f"{width + 0.3:.1f}",
                        height=f"{height - 1:.1f}",
                        class_=f"q{level_of(value, edges)}",
                    )
                )
    for column in sorted({0, len(steps) // 2, len(steps) - 1}):
        place = LEFT + (column + 0.5) * width
        parts.append(
            element("text", short(steps[column], digits=6), x=f"{place:.1f}", y=BOTTOM + 16, text_anchor="middle")
        )
    return element(
        "svg",
        element("title", heatmap.title, id=f"{heatmap.name}-title"),
        element("desc", f"{heatmap.text} The table below has the numbers.", id=f"{heatmap.name}-text"),
        element("g", *parts, class_="axes"),
        class_="chart heat",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{heatmap.name}-title {heatmap.name}-text",
    )


def _place(label: str) -> str:
    return label.removeprefix("part ").replace(" of ", "/")
