"""The parts that all pictures of an ablation share: colours, marks, and a mean with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.ablation.statistics import bootstrap_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
"""Colours that colour-blind readers can tell apart (Okabe and Ito), without yellow, which vanishes on white."""
MARKS = "os^DvPX<>*hp"
GREY = "#777777"
LONGEST_NAME = 48
SMALL = 8
"""Font size of ticks and legends."""


class Style(NamedTuple):
    """The colour, mark and line of an arm; the first 84 arms all look different."""

    colour: str
    mark: str
    dashes: str


def style(index: int) -> Style:
    """The style of arm number `index`."""
    dashes = ("-", "--", ":", "-.")[index // len(COLOURS) % 4]
    return Style(COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)], dashes)


@dataclass(frozen=True, kw_only=True)
class Points:
    """The values of one measure along an axis: at each place one value per seed."""

    label: str
    """The text in the legend; "" for no entry."""
    look: Style
    """The colour and the mark."""
    at: Mapping[float, Sequence[float]]
    """Place on the axis -> values, one per seed."""


def named(text: str) -> str:
    """A name as matplotlib can show it: without mathematics, never hidden, its middle left out where it is long."""
    end = LONGEST_NAME // 2
    short = text if len(text) <= LONGEST_NAME else f"{text[: end - 1]}…{text[-end:]}"
    return ("\u200b" if short.startswith("_") else "") + short.replace("$", r"\$") or "(no name)"


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, which pyplot does not know of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path, *, dpi: int) -> tuple[Path, ...]:
    """Write a figure as PNG, and beside it as PDF (letters as fonts, for papers) and as SVG; the same bytes every time.

    Args:
        figure: what to write.
        file: the PNG; the others differ in their ending.
        dpi: dots per inch of the PNG.
    """
    import matplotlib as mpl

    dated = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    written = tuple(file.with_suffix(ending) for ending in dated)
    with mpl.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "klamp"}):
        for each in written:
            figure.savefig(each, dpi=dpi, metadata=dated[each.suffix])
            figure.set_layout_engine("none")  # the others are laid out as the first one was
    return written


def draw_points(axes: Any, points: Points, *, confidence: float, aside: float, upright: bool = True) -> None:
    """Draw the mean with its interval, and every seed as a faint point beside it.

    Args:
        axes: of matplotlib.
        points: what to draw.
        confidence: of the interval.
        aside: how far from the mean the seeds stand.
        upright: whether values run upwards; else places do, and values to the right.
    """
    label = points.label
    for place, values in sorted(points.at.items()):
        seeds = ([place - aside] * len(values), values) if len(values) > 1 else ([], [])
        axes.scatter(*(seeds if upright else seeds[::-1]), s=14, color=points.look.colour, alpha=0.45, linewidths=0)
        mean = sum(values) / len(values)
        interval = bootstrap_interval(values, confidence=confidence) or (mean, mean)
        reach = [[max(0.0, mean - interval[0])], [max(0.0, interval[1] - mean)]]
        axes.errorbar(
            *((place, mean) if upright else (mean, place)),
            **{"yerr" if upright else "xerr": reach},
            color=points.look.colour,
            fmt=points.look.mark,
            markersize=6,
            capsize=3,
            linewidth=1.6,
            label=named(label) if label else None,
        )
        label = ""


def join_means(axes: Any, points: Points, places: Sequence[float]) -> None:
    """Draw a line through the means."""
    means = [sum(points.at[place]) / len(points.at[place]) for place in places if place in points.at]
    known = [place for place in places if place in points.at]
    axes.plot(known, means, color=points.look.colour, linestyle=points.look.dashes, linewidth=1.4, alpha=0.8)


def tidy(axes: Any, *, x: str = "", y: str = "", title: str = "") -> None:
    """Put labels and a light grid on a diagram, and take its box away."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=SMALL)
    axes.grid(visible=True, alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def wants_logarithm(values: Sequence[float]) -> bool:
    """Whether values want a logarithmic axis: all are positive, and the largest is 30 times the smallest."""
    return bool(values) and min(values) > 0 and max(values) > 30 * min(values)


def show_decades(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers: 1, 2 and 5 of each decade, or 1 only where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
