"""The picture of a sweep: trained skill, KL and retained skills, against beta or whatever else was swept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from klamp.ablation.drawing import (
    GREY,
    SMALL,
    Points,
    draw_points,
    join_means,
    named,
    new_figure,
    show_decades,
    style,
    tidy,
    wants_logarithm,
)
from klamp.ablation.outcome import BY_NAME, Column, Outcome, retained_before, retained_skills

MOST_LINES = 6
"""More lines than this over one axis of beta cannot be told apart; the arms are listed instead."""


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


if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASIDE = 0.09
"""How far sets of points over the same place are moved apart, in decades of beta, so that none hides another."""
START = "before training"
LISTED = 0.3
"""The same distance in a list of arms, in rows."""


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
    columns: Sequence[Column]
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


def _columns(done: Sequence[Outcome], names: Sequence[str]) -> list[Column]:
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


def _points(done: Sequence[Outcome], shown: Sequence[Column], where: Places) -> list[Points]:
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
