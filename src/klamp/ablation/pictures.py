"""The pictures of an ablation as PNG, PDF and SVG: what the KL bought, and the sweep where beta alone was swept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from klamp.ablation.outcome import BY_NAME, Outcome, TableColumn, retained_before, retained_skills
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


def write_pictures(outcomes: Sequence[Outcome], folder: Path) -> tuple[Path, ...]:
    """Draw frontier.png and sweep.png, as far as there is data, and their PDFs and SVGs.

    Args:
        outcomes: of all runs.
        folder: where the files go; it exists.

    Returns:
        The files that were written.
    """
    figures = {"frontier.png": draw_frontier(outcomes), "sweep.png": draw_sweep(outcomes)}
    return tuple(file for name, figure in figures.items() if figure for file in save(figure, folder / name, dpi=130))


def draw_frontier(outcomes: Sequence[Outcome]) -> Figure | None:
    """Draw every skill's score against the KL of a completion: a point per run, larger ones for the means of the arms.

    The trained skill stands first; a dotted line is the score before training. None where no run has a KL.

    Args:
        outcomes: of all runs.
    """
    column = BY_NAME["kl/reverse_sequence"]
    done = [outcome for outcome in outcomes if column.value(outcome) is not None]
    if not done:
        return None
    skills = list(dict.fromkeys(skill for o in done for skill in (o.rl_skill, *retained_skills(o)) if skill in o.after))
    arms = {arm: style(i) for i, arm in enumerate(dict.fromkeys(outcome.arm for outcome in done))}
    figure = new_figure(3.2 * len(skills), 3.4)
    grid = figure.subplots(1, len(skills), squeeze=False)[0]
    for axes, skill in zip(grid, skills, strict=True):
        for arm, look in arms.items():
            points = [(o.numbers[column.name], o.after[skill]) for o in done if o.arm == arm and skill in o.after]
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, s=16, color=look.colour, marker=look.mark, alpha=0.5, linewidths=0)
                mean = fmean(x), fmean(y)
                axes.scatter(*mean, s=70, color=look.colour, marker=look.mark, linewidths=0, label=named(arm))
        before = _mean(o.before.get(skill) for o in done)
        if before is not None:
            axes.axhline(before, color=GREY, linestyle=":", linewidth=1.2)
        scale(axes, "x", [o.numbers[column.name] for o in done])
        trained = "trained" if any(o.rl_skill == skill for o in done) else "not trained"
        tidy(axes, x=f"{column.title} ({column.unit})", title=f"{named(skill)} ({trained})")
    grid[0].set_ylabel("score after training; dotted: before", fontsize=9)
    _legend(figure, grid[0])
    return figure


def draw_sweep(outcomes: Sequence[Outcome]) -> Figure | None:
    """Draw trained skill, KL and retained skills over beta, with seeds, mean and interval.

    The axis of beta is logarithmic, and linear between 0 and the smallest other beta. None where anything but beta was
    swept, and without any data.

    Args:
        outcomes: of all runs; those that failed have nothing to draw.
    """
    done = [outcome for outcome in outcomes if outcome.state == "done"]
    betas, panels = betas_of({outcome.arm: outcome.values for outcome in done}), _panels(done)
    if not (betas and panels):
        return None
    held = all(outcome.numbers.get("beta", betas[outcome.arm]) == betas[outcome.arm] for outcome in done)
    figure = new_figure(4.3 * len(panels), 4.0)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _label_betas(axes, sorted({*betas.values()}))
        every: list[float] = []
        for number, column in enumerate(panel.columns):
            at: dict[float, list[float]] = {}
            for outcome in done:
                if (value := column.value(outcome)) is not None:
                    at.setdefault(betas[outcome.arm], []).append(value)
            every += [value for values in at.values() for value in values]
            draw_points(axes, at, style(number), label=column.title if len(panel.columns) > 1 else "")
        scale(axes, "y", every)
        if panel.start is not None:
            _draw_start(axes, panel.start)
        tidy(axes, x="beta" if held else "beta, as configured", y=panel.unit, title=panel.title)
        if len(panel.columns) > 1:
            axes.legend(fontsize=SMALL, framealpha=0.8, edgecolor="none")
    return figure


class _Panel(NamedTuple):
    """One diagram of the picture."""

    title: str
    unit: str
    columns: Sequence[TableColumn]
    start: float | None = None
    """The mean before training; None where the panel shows no score."""


def _panels(done: Sequence[Outcome]) -> list[_Panel]:
    """The diagrams that have data."""
    kl = _columns(done, ["kl/reverse", "kl/forward"])
    trained, kept = [o.rl_skill for o in done], [skill for o in done for skill in retained_skills(o)]
    before = _mean(o.before.get(o.rl_skill) for o in done), _mean(map(retained_before, done))
    after = _columns(done, ["rl/after"]), _columns(done, ["retained/after"])
    found = [
        _Panel(_titled("RL skill", trained), "score after training", after[0], before[0]),
        _Panel(kl[0].title if len(kl) == 1 else "KL", "nats per token", kl),
        _Panel(_titled("retained skills", kept), "mean score after training", after[1], before[1]),
    ]
    return [panel for panel in found if panel.columns]


def _columns(done: Sequence[Outcome], names: Sequence[str]) -> list[TableColumn]:
    columns = [BY_NAME[name] for name in names]
    return [column for column in columns if any(column.value(outcome) is not None for outcome in done)]


def _titled(title: str, skills: Iterable[str]) -> str:
    names = ", ".join(filter(None, dict.fromkeys(skills)))
    return f"{title}: {named(names)}" if names else title


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def betas_of(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Arm -> its beta, where at least two betas were swept and nothing else; otherwise nothing.

    Args:
        arms: name -> the values that were swept.
    """
    others = {repr(sorted((name, repr(v)) for name, v in each.items() if name != "beta")) for each in arms.values()}
    betas = {arm: values.get("beta") for arm, values in arms.items()}
    known = {arm: float(b) for arm, b in betas.items() if isinstance(b, int | float) and math.isfinite(b) and b >= 0}
    alone = len(others) == 1 and len(known) == len(arms) and len(set(known.values())) > 1
    return known if alone else {}


def _label_betas(axes: Any, betas: Sequence[float]) -> None:
    axes.set_xscale("symlog", linthresh=min(beta for beta in betas if beta > 0))
    axes.set_xticks(betas, [f"{beta:g}" for beta in betas], minor=False, rotation=45 if len(betas) > 6 else 0)
    axes.set_xticks([], minor=True)


def _draw_start(axes: Any, start: float) -> None:
    """Draw a line at the score before training."""
    axes.axhline(start, color=GREY, linestyle="--", linewidth=1)
    look = {"ha": "right", "va": "bottom", "fontsize": SMALL, "color": GREY}
    axes.text(0.99, start, "before training", transform=axes.get_yaxis_transform(), **look)


def draw_points(axes: Any, at: Mapping[float, Sequence[float]], look: Style, *, label: str) -> None:
    """Draw the means with their intervals, joined, and every seed as a faint point.

    Args:
        axes: of matplotlib.
        at: place on the axis -> values, one per seed.
        look: colour and mark.
        label: in the legend; "" for no entry.
    """
    means = [fmean(at[place]) for place in sorted(at)]
    axes.plot(sorted(at), means, color=look.colour, linestyle=look.dashes, linewidth=1.4, alpha=0.8)
    for place, mean in zip(sorted(at), means, strict=True):
        if len(at[place]) > 1:
            axes.scatter([place] * len(at[place]), at[place], s=14, color=look.colour, alpha=0.45, linewidths=0)
        low, high = bootstrap_interval(at[place]) or (mean, mean)
        axes.errorbar(
            place,
            mean,
            yerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]],
            color=look.colour,
            fmt=look.mark,
            markersize=6,
            capsize=3,
            linewidth=1.6,
            label=named(label) if label else None,
        )
        label = ""


class Style(NamedTuple):
    """The colour, mark and line of an arm; the first 84 arms all look different."""

    colour: str
    mark: str
    dashes: str


def style(index: int) -> Style:
    """The style of arm number `index`."""
    dashes = ("-", "--", ":", "-.")[index // len(COLOURS) % 4]
    return Style(COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)], dashes)


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
            figure.savefig(each, dpi=dpi, metadata=dated[each.suffix], bbox_inches="tight")
            figure.set_layout_engine("none")  # the others are laid out as the first one was
    return written


def _legend(figure: Figure, axes: Any) -> None:
    """Name what is drawn in a diagram, at the right of all; the picture is cut to what is drawn when it is written."""
    named_ones = axes.get_legend_handles_labels()
    figure.legend(*named_ones, loc="upper left", bbox_to_anchor=(1, 1), fontsize=SMALL, frameon=False)


def tidy(axes: Any, *, x: str = "", y: str = "", title: str = "") -> None:
    """Put labels and a light grid on a diagram, and take its box away."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=SMALL)
    axes.grid(visible=True, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def scale(axes: Any, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values are positive and the largest is 30 times the smallest.

    It is labelled with plain numbers: 1, 2 and 5 of each decade, or 1 only where there are many.
    """
    if not values or min(values) <= 0 or max(values) <= 30 * min(values):
        return
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 300 * min(values) else (1,), numticks=8))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
