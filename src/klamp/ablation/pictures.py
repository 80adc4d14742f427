"""The pictures of an ablation as PNG, PDF and SVG files: what the KL bought, the sweep, the runs' courses.

The sweep stands over a logarithmic axis of beta where little else was swept, else in a list of arms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.ablation.outcome import BY_NAME, Outcome, TableColumn, retained_before, retained_skills
from klamp.ablation.statistics import bootstrap_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {"reward": "reward", "kl/k3": "KL, k3 (nats/token)", "length": "length (tokens)"}
"""Metric of `Outcome.by_step` -> label."""
DPI = 130
NOT_DRAWN = {
    "frontier.png": "no run has a KL of whole completions",
    "sweep.png": "no run has a score or a KL",
    "courses.png": "no run logged a step",
}
"""A picture -> why it is not there, where it is not."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
"""Colours that colour-blind readers can tell apart (Okabe and Ito), without yellow, which vanishes on white."""
MARKS = "os^DvPX<>*hp"
GREY = "#777777"
LONGEST_NAME = 48
SMALL = 8
"""Font size of ticks and legends."""
MOST_LINES = 6
"""More lines than this over one axis of beta cannot be told apart; the arms are listed instead."""
ASIDE = 0.09
"""How far sets of points over the same place are moved apart, in decades of beta, so that none hides another."""
START = "before training"
LISTED = 0.3
"""The same distance in a list of arms, in rows."""


def write_pictures(outcomes: Sequence[Outcome], folder: Path, *, confidence: float = 0.95) -> tuple[Path, ...]:
    """Draw frontier.png, sweep.png and courses.png, as far as there is data, and their PDFs and SVGs.

    Args:
        outcomes: of all runs.
        folder: where the files go; it exists.
        confidence: of the intervals.

    Returns:
        The files that were written.
    """
    figures = {
        "frontier.png": draw_frontier(outcomes),
        "sweep.png": draw_sweep(outcomes, confidence=confidence),
        "courses.png": draw_courses(outcomes),
    }
    written: list[Path] = []
    for name, figure in figures.items():
        if figure is not None:
            written += save(figure, folder / name, dpi=DPI)
    return tuple(written)


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
    longest = max(len(named(arm)) for arm in arms)
    figure = new_figure(3.2 * len(skills) + 0.9 + 0.075 * longest, max(3.4, 0.6 + 0.24 * len(arms)))
    grid = figure.subplots(1, len(skills), squeeze=False)[0]
    for axes, skill in zip(grid, skills, strict=True):
        for arm, look in arms.items():
            group = [o for o in done if o.arm == arm and skill in o.after]
            points = [(o.numbers[column.name], o.after[skill]) for o in group]
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, s=16, color=look.colour, marker=look.mark, alpha=0.5, linewidths=0)
                mean = sum(x) / len(x), sum(y) / len(y)
                axes.scatter(*mean, s=70, color=look.colour, marker=look.mark, linewidths=0, label=named(arm))
        before = [o.before[skill] for o in done if skill in o.before]
        if before:
            axes.axhline(sum(before) / len(before), color=GREY, linestyle=":", linewidth=1.2)
        if wants_logarithm([o.numbers[column.name] for o in done]):
            axes.set_xscale("log")
            show_decades(axes.xaxis)
        trained = any(o.rl_skill == skill for o in done)
        tidy(
            axes,
            x=f"{column.title} ({column.unit})",
            title=f"{named(skill)} ({'trained' if trained else 'not trained'})",
        )
    grid[0].set_ylabel("score after training; dotted: before", fontsize=9)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=SMALL, frameon=False)
    return figure


def draw_courses(outcomes: Sequence[Outcome]) -> Figure | None:
    """Draw reward, KL and length over the steps: each arm's mean over seeds, with a band from lowest to highest.

    None where no run has a course. At beta 0 training measures no KL: the arm's mark there is the exact KL that was
    measured after training. What an arm has nothing of is said above the panel.

    Args:
        outcomes: of all runs.
    """
    arms: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.state == "done":
            arms.setdefault(outcome.arm, []).append(outcome)
    courses = {metric: {arm: _course(runs, metric) for arm, runs in arms.items()} for metric in CURVES}
    if not any(any(of.values()) for of in courses.values()):
        return None
    ends = {arm: _measured_after(runs) for arm, runs in arms.items() if not courses["kl/k3"][arm]}
    courses["kl/k3"] |= ends
    shown = [metric for metric, of in courses.items() if any(of.values())]
    longest = max(len(named(arm)) for arm in arms)
    figure = new_figure(4.2 * len(shown) + 0.9 + 0.075 * longest, max(3.8, 0.6 + 0.24 * len(arms)))
    grid = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, metric in zip(grid, shown, strict=True):
        for i, (arm, course) in enumerate(courses[metric].items()):
            _draw_course(axes, named(arm), course, i, veil=0.15 if len(arms) <= 4 else 0.06)
        tidy(axes, x="step", y=CURVES[metric], title=_beside_lines(courses[metric], ends if metric == "kl/k3" else {}))
        axes.title.set_fontsize(SMALL)
        axes.xaxis.get_major_locator().set_params(integer=True)
    several = any(len(runs) > 1 for runs in arms.values())
    figure.suptitle("mean over seeds; band: lowest to highest seed" if several else "one seed per arm", fontsize=10)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=SMALL, frameon=False)
    return figure


def _measured_after(runs: Sequence[Outcome]) -> dict[float, list[float]]:
    """The exact KL after training, in the place of a course: last step -> values of the seeds."""
    last = max((max(run.by_step.get("step", ()), default=0.0) for run in runs), default=0.0)
    found = [value for run in runs if (value := BY_NAME["kl/reverse"].value(run)) is not None]
    return {last: found} if found else {}


def _beside_lines(of: Mapping[str, Mapping[float, Sequence[float]]], ends: Mapping[str, object]) -> str:
    """What a panel says of the arms that have no line in it."""
    without = [named(arm) for arm, course in of.items() if not course]
    marks = "mark: exact, after training (none was logged)" if any(ends.values()) else ""
    return "\n".join(filter(None, (marks, f"no data: {', '.join(without)}" if without else "")))


def _course(runs: Sequence[Outcome], metric: str) -> dict[float, list[float]]:
    """Step -> values of the seeds, for the steps that most seeds have."""
    found: dict[float, list[float]] = {}
    for run in runs:
        by_step: Mapping[str, Sequence[float]] = run.by_step
        for step, value in zip(by_step.get("step", ()), by_step.get(metric, ()), strict=False):
            if value is not None and math.isfinite(value):
                found.setdefault(step, []).append(value)
    most = max((len(values) for values in found.values()), default=0)
    return {step: found[step] for step in sorted(found) if len(found[step]) == most}


def _draw_course(axes: Any, label: str, course: Mapping[float, Sequence[float]], index: int, *, veil: float) -> None:
    look, steps = style(index), list(course)
    mean = [sum(values) / len(values) for values in course.values()]
    mark = look.mark if len(steps) == 1 else None
    axes.plot(steps, mean, color=look.colour, linestyle=look.dashes, linewidth=1.6, marker=mark, label=label)
    if any(len(values) > 1 for values in course.values()):
        low, high = [min(values) for values in course.values()], [max(values) for values in course.values()]
        axes.fill_between(steps, low, high, color=look.colour, alpha=veil, linewidth=0)


def draw_sweep(outcomes: Sequence[Outcome], *, confidence: float = 0.95) -> Figure | None:
    """Draw trained skill, KL and retained skills of every arm, with seeds, mean and interval; None without any data.

    Over a logarithmic axis of beta, with beta 0 apart, where beta was swept; else one row per arm.

    Args:
        outcomes: of all runs; those that failed have nothing to draw.
        confidence: of the bootstrap intervals.
    """
    done = [outcome for outcome in outcomes if outcome.state == "done"]
    where = places({outcome.arm: outcome.values for outcome in done})
    panels = _panels(done, several=len(where.lines) > 1)
    if not panels:
        return None
    listed = max(2.8, 1.7 + 0.32 * len(where.of))
    beside = 0.075 * max(map(len, where.lines)) if where.over_beta else 2.0
    figure = new_figure(4.3 * len(panels) + beside, 4.0 if where.over_beta else listed)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=not where.over_beta)[0]
    for axes, panel in zip(grid, panels, strict=True):
        points = _points(done, panel.columns, where)
        for each in points:
            draw_points(axes, each, confidence=confidence, aside=0.4 * _apart(where), upright=where.over_beta)
        values = [value for each in points for found in each.at.values() for value in found]
        (_over_beta if where.over_beta else _listed)(axes, where, points, values)
        _before(axes, panel.start, upright=where.over_beta)
        tidy(axes, **({"x": "beta", "y": panel.unit} if where.over_beta else {"x": panel.unit}), title=panel.title)
    handles, labels = grid[-1].get_legend_handles_labels()
    if len(where.lines) > 1:
        figure.legend(handles, labels, loc="outside right upper", fontsize=SMALL, frameon=False)
    for axes in (axes for axes in grid if len(where.lines) == 1 and axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize=SMALL, framealpha=0.8, edgecolor="none")
    return figure


class _Panel(NamedTuple):
    """One diagram of the picture."""

    title: str
    unit: str
    columns: Sequence[TableColumn]
    start: float | None
    """The mean before training; None where the panel shows no score."""


def _panels(done: Sequence[Outcome], *, several: bool) -> list[_Panel]:
    """The diagrams that have data; where several lines share an axis, the KL in one direction only."""
    kl = _columns(done, ["kl/reverse"] if several else ["kl/reverse", "kl/forward"])
    skills, kept = {o.rl_skill: 0 for o in done}, {skill: 0 for o in done for skill in retained_skills(o)}
    before = [o.before.get(o.rl_skill) for o in done], [retained_before(o) for o in done]
    found = [
        _Panel(_titled("RL skill", skills), "score after training", _columns(done, ["rl/after"]), _mean(before[0])),
        _Panel(kl[0].title if len(kl) == 1 else "KL", "nats per token", kl, None),
        _Panel(
            _titled("retained skills", kept),
            "mean score after training",
            _columns(done, ["retained/after"]),
            _mean(before[1]),
        ),
    ]
    return [panel for panel in found if panel.columns]


def _columns(done: Sequence[Outcome], names: Sequence[str]) -> list[TableColumn]:
    columns = [BY_NAME[name] for name in names]
    return [column for column in columns if any(column.value(outcome) is not None for outcome in done)]


def _titled(title: str, skills: Iterable[str]) -> str:
    names = ", ".join(filter(None, skills))
    return f"{title}: {named(names)}" if names else title


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _apart(where: Places) -> float:
    """How far sets of points are moved apart, so that they do not cover each other."""
    if not where.over_beta:
        return LISTED
    at = sorted(where.ticks)
    closest = min(b - a for a, b in pairwise(at))
    return min(ASIDE, 0.5 * closest / max(2, len(where.lines)))


def _points(done: Sequence[Outcome], shown: Sequence[TableColumn], where: Places) -> list[Points]:
    """One set of points per line and measure, each in its own colour, moved a little apart."""
    sets = [(line, column) for line in where.lines for column in shown]
    step = _apart(where)
    found: list[Points] = []
    for number, (line, column) in enumerate(sets):
        aside, at = step * (number - (len(sets) - 1) / 2), dict[float, list[float]]()
        for outcome in done:
            value, (own, place) = column.value(outcome), where.of[outcome.arm]
            if own == line and value is not None:
                at.setdefault(place + aside, []).append(value)
        label = ", ".join(filter(None, (line, column.title if len(shown) > 1 else "")))
        found.append(Points(label=label, look=style(number), at=at))
    return found


def _over_beta(axes: Any, where: Places, points: Sequence[Points], values: Sequence[float]) -> None:
    for each in points:
        join_means(axes, each, [place for place in sorted(each.at) if where.gap is None or place > where.gap])
    axes.set_xticks(list(where.ticks), list(where.ticks.values()), rotation=45 if len(where.ticks) > 6 else 0)
    margin = 0.06 * (max(where.ticks) - min(where.ticks)) + _apart(where) * len(points)
    axes.set_xlim(min(where.ticks) - margin, max(where.ticks) + margin)
    if where.gap is not None:
        axes.axvline(where.gap, color=GREY, linestyle=(0, (1, 3)), linewidth=1)
        axes.text(where.gap, 0, "//", transform=axes.get_xaxis_transform(), ha="center", va="center", color=GREY)
    if wants_logarithm(values):
        axes.set_yscale("log")
        show_decades(axes.yaxis)


def _listed(axes: Any, where: Places, points: Sequence[Points], values: Sequence[float]) -> None:
    axes.set_yticks(list(where.ticks), [named(arm) for arm in where.ticks.values()])
    axes.set_ylim(max(where.ticks) + 0.6, min(where.ticks) - 0.6)
    if wants_logarithm(values):
        axes.set_xscale("log")
        show_decades(axes.xaxis)


def _before(axes: Any, start: float | None, *, upright: bool) -> None:
    """Draw a line at the score before training."""
    if start is not None:
        (axes.axhline if upright else axes.axvline)(start, color=GREY, linestyle="--", linewidth=1)
        at, turned = ((0.99, start), 0) if upright else ((start, 0.02), 90)
        across = axes.get_yaxis_transform() if upright else axes.get_xaxis_transform()
        axes.text(*at, START, transform=across, ha="right", va="bottom", rotation=turned, fontsize=SMALL, color=GREY)


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of a sweep's arms on the axis of its picture."""

    of: Mapping[str, tuple[str, float]]
    """Arm -> (line, place); the line is named by what is swept besides beta, "" where that is nothing."""
    ticks: Mapping[float, str]
    """Place on the axis -> its label."""
    over_beta: bool
    """Whether places are logarithms of beta; otherwise they number the arms."""
    gap: float | None = None
    """Where the axis is broken, between beta 0 and the smallest other one; None without both."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The names of the lines, in the order of their arms."""
        return tuple(dict.fromkeys(line for line, _ in self.of.values()))


def places(arms: Mapping[str, Mapping[str, Any]]) -> Places:
    """Where to draw each arm: along beta where at least two betas were swept and little else, otherwise in a list.

    Args:
        arms: name -> the values that were swept.
    """
    others = [name for name in _varied(arms) if name != "beta"]
    lines = {arm: " ".join(f"{name}={values.get(name)}" for name in others) for arm, values in arms.items()}
    if len(set(lines.values())) > MOST_LINES or not _betas(arms):
        count = range(len(arms))
        return Places(
            of={arm: ("", float(place)) for arm, place in zip(arms, count, strict=True)},
            ticks={float(place): arm for arm, place in zip(arms, count, strict=True)},
            over_beta=False,
        )
    at = _logarithmic(sorted({float(values["beta"]) for values in arms.values()}))
    zero = at.get(0.0)
    return Places(
        of={arm: (lines[arm], at[float(values["beta"])]) for arm, values in arms.items()},
        ticks={place: f"{beta:g}" for beta, place in at.items()},
        over_beta=True,
        gap=None if zero is None else (zero + min(place for beta, place in at.items() if beta)) / 2,
    )


def _varied(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The fields whose value differs between the arms."""
    names = dict.fromkeys(name for values in arms.values() for name in values)
    return [name for name in names if len({repr(values.get(name)) for values in arms.values()}) > 1]


def _betas(arms: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every arm has a positive (or zero) beta, and the betas differ."""
    betas = [values.get("beta") for values in arms.values()]
    known = all(isinstance(beta, int | float) and math.isfinite(beta) and beta >= 0 for beta in betas)
    return known and len(set(betas)) > 1


def _logarithmic(betas: Sequence[float]) -> dict[float, float]:
    """The place of each beta on a logarithmic axis; 0 stands one step left of the smallest."""
    at = {beta: math.log10(beta) for beta in betas if beta > 0}
    if 0.0 in betas:
        spread = (max(at.values()) - min(at.values())) / max(1, len(at) - 1)
        at = {0.0: min(at.values()) - max(0.6, spread), **at}
    return at


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
