"""The pictures of an ablation as PNG files: what the KL bought, the sweep, KL against forgetting, the runs' courses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.ablation.drawing import GREY, SMALL, named, new_figure, save, show_decades, style, tidy, wants_logarithm
from klamp.ablation.outcome import BY_NAME, Column, Outcome, retained_loss, retained_skills
from klamp.ablation.statistics import rank_correlation
from klamp.ablation.sweep_picture import draw_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = {"reward": "reward", "kl/k3": "KL, k3 (nats/token)", "length": "length (tokens)"}
"""Metric of `Outcome.by_step` -> label."""
DPI = 130
NOT_DRAWN = {
    "frontier.png": "no run has a KL of whole completions",
    "sweep.png": "no run has a score or a KL",
    "forgetting.png": "no run has a KL and skills that were not trained",
    "courses.png": "no run logged a step",
}
"""A picture -> why it is not there, where it is not."""
LEAST_SPAN = 0.02
"""Scores that differ by less fill no axis: nothing was forgotten."""


def write_pictures(outcomes: Sequence[Outcome], folder: Path, *, confidence: float = 0.95) -> tuple[Path, ...]:
    """Draw frontier.png, sweep.png, forgetting.png and courses.png, as far as there is data, and their PDFs and SVGs.

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
        "forgetting.png": draw_forgetting(outcomes, confidence=confidence),
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


def draw_forgetting(outcomes: Sequence[Outcome], *, confidence: float = 0.95) -> Figure | None:
    """Draw how much each run forgot against both of its KLs, with Spearman's correlation over the runs.

    None where no run has a KL and retained skills.

    Args:
        outcomes: of all runs.
        confidence: of the interval of the correlation.
    """
    done = [outcome for outcome in outcomes if outcome.state == "done"]
    kls = [BY_NAME["kl/reverse"], BY_NAME["kl/forward"]]
    shown = [column for column in kls if any(_pair(column, outcome) for outcome in done)]
    if not shown:
        return None
    arms = {arm: style(i) for i, arm in enumerate(dict.fromkeys(outcome.arm for outcome in done))}
    longest = max(len(named(arm)) for arm in arms)
    figure = new_figure(4.6 * len(shown) + 0.9 + 0.075 * longest, max(4.2, 0.6 + 0.24 * len(arms)))
    grid = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, column in zip(grid, shown, strict=True):
        pairs = {arm: [p for o in done if o.arm == arm and (p := _pair(column, o))] for arm in arms}
        for arm, look in arms.items():
            x, y = zip(*pairs[arm], strict=True) if pairs[arm] else ((), ())
            axes.scatter(x, y, s=38, color=look.colour, marker=look.mark, alpha=0.85, linewidths=0, label=named(arm))
        every = [pair for found in pairs.values() for pair in found]
        tidy(axes, x=f"{column.title} ({column.unit})", title=_correlation(every, confidence))
        axes.axhline(0, color="#999999", linewidth=0.8)
        if wants_logarithm([x for x, _ in every]):
            axes.set_xscale("log")
            show_decades(axes.xaxis)
    low, high = grid[0].get_ylim()
    if high - low < LEAST_SPAN:
        grid[0].set_ylim((low + high - LEAST_SPAN) / 2, (low + high + LEAST_SPAN) / 2)
    skills = dict.fromkeys(skill for outcome in done for skill in retained_skills(outcome))
    grid[0].set_ylabel(f"forgotten: mean score lost\n({named(', '.join(skills))})", fontsize=9)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", fontsize=SMALL, frameon=False)
    return figure


def _pair(column: Column, outcome: Outcome) -> tuple[float, float] | None:
    """The KL of a run and how much it forgot; None where either is missing."""
    kl, lost = column.value(outcome), retained_loss(outcome)
    return None if kl is None or lost is None or not math.isfinite(lost) else (kl, lost)


def _correlation(pairs: Sequence[tuple[float, float]], confidence: float) -> str:
    runs = f"{len(pairs)} run{'s' if len(pairs) != 1 else ''}"
    found = rank_correlation([x for x, _ in pairs], [y for _, y in pairs], confidence=confidence)
    if found is None:
        return f"no rank correlation ({runs})"
    return f"rank correlation {found.value:.2f} [{found.low:.2f}, {found.high:.2f}], {runs}"


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
