"""Pictures of the records: panels of lines or bars, drawn without a screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARKS = "osv^Dx*P"
OWN = ("linear", "klamp")
"""What klamp's lines and bars are called."""
COLOUR = "tab:blue"
OTHERS = ("tab:gray", "tab:orange", "tab:green", "tab:red", "tab:purple")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram: lines (name -> points) or bars (name -> length)."""

    title: str
    label: str
    """What is measured, with its unit."""
    over: str = ""
    """The horizontal axis of lines."""
    linear: bool = False
    """Whether that axis is linear, and the points are too many for a mark and a tick each."""
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    bars: Mapping[str, float] = field(default_factory=dict)


def draw(panels: Sequence[Panel], file: Path, *, columns: int = 2) -> None:
    """Draw the panels into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False)
    for place, panel in zip(grid.flat, panels, strict=False):
        (_bars if panel.bars else _lines)(place, panel)
        place.set_title(panel.title, fontsize=10)
    for place in list(grid.flat)[len(panels) :]:
        place.set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _short(value: float) -> str:
    """A number for a mark or a bar."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _lines(place: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    others = iter(OTHERS * 2)
    for (name, points), mark in zip(panel.lines.items(), MARKS * 2, strict=False):
        own = name.startswith(OWN)
        colour, width = (COLOUR, 2.2) if own else (next(others), 1.2)
        shown = "" if panel.linear else mark
        place.plot(*zip(*points, strict=True), marker=shown, label=name, color=colour, linewidth=width, markersize=4)
    place.set(xscale="linear" if panel.linear else "log", yscale="log", xlabel=panel.over, ylabel=panel.label)
    if not panel.linear:
        ticks = sorted({x for points in panel.lines.values() for x, _ in points})
        place.set_xticks(ticks, [f"{x:,.0f}" for x in ticks], fontsize=7, rotation=30)
    place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    place.yaxis.set_major_formatter(lambda value, _: _short(value))
    place.minorticks_off()
    place.grid(visible=True, alpha=0.3)
    place.legend(fontsize=7)


def _bars(place: Any, panel: Panel) -> None:
    names = list(panel.bars)
    colours = [COLOUR if any(own in name for own in OWN) else "tab:gray" for name in names]
    drawn = place.barh(names, [panel.bars[name] for name in names], color=colours)
    place.bar_label(drawn, fmt=_short, fontsize=8, padding=2)
    place.invert_yaxis()
    place.tick_params(labelsize=8)
    place.margins(x=0.2)
    place.set_xlabel(panel.label)
