"""What happens to completions once the reward has saturated: length, fillers and KL, then and at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from klamp.ablation.pictures import COLOURS, named, tidy
from klamp.ablation.plan import Run, run_folder
from klamp.ablation.table import cell_of, cell_text
from klamp.training.folders import COMPLETIONS, METRICS_FILE, lines_of
from studies.fillers import FILLER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 10
"""Steps over which a curve is averaged before it is looked at."""

SATURATED = 0.95
"""The reward (of at most 1) from which on a run counts as saturated."""

MARKDOWN, PICTURE = "saturation.md", "saturation.png"
"""The files that are written into the folder of the ablation."""

COLUMNS: Mapping[str, str] = {
    "saturated": "saturated at step",
    "length/saturated": "length then",
    "length/end": "length at the end",
    "length/growth": "growth",
    "length/against": "end, against {first}",
    "fillers/end": "fillers at the end",
    "kl/token": "KL (nats/token)",
    "kl/sequence": "KL (nats/completion)",
    "reward/end": "reward at the end",
}
"""Number of a course -> heading; `against` is the difference to the run of the first arm with the same seed."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The course of one run."""

    arm: str
    """The name of its arm."""
    seed: int = 0
    """The seed of the run."""
    steps: Sequence[int]
    """The steps that were logged."""
    lengths: Sequence[float]
    """The mean tokens per completion in each of these steps, end token included."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Those of `COLUMNS` that the run has; some exist only once the reward has saturated."""


def course_of(
    arm: str, rows: Sequence[Mapping[str, Any]], completions: Sequence[Mapping[str, Any]], *, seed: int = 0
) -> Course:
    """The course of a run; it is saturated at the first step at which the mean reward of the last ten is 0.95.

    Args:
        arm: name of its arm.
        rows: its metrics, one mapping per training step, in order.
        completions: some of those it wrote, with `step` and `completion`.
        seed: its seed.
    """
    lengths = [float(row["length/mean"]) for row in rows]
    rewards = [float(row["reward"]) for row in rows]
    numbers = {"length/end": fmean(lengths[-WINDOW:]), "reward/end": fmean(rewards[-WINDOW:])}
    for name, metric in (("kl/token", "kl/exact"), ("kl/sequence", "kl/exact_sequence")):
        found = [float(row[metric]) for row in rows[-WINDOW:] if metric in row]
        numbers |= {name: fmean(found)} if found else {}
    end = int(rows[-1]["step"])
    fillers = [str(each["completion"]).count(FILLER) for each in completions if each["step"] > end - WINDOW]
    numbers |= {"fillers/end": fmean(fillers)} if fillers else {}
    reached = next((i for i in range(WINDOW, len(rows) + 1) if fmean(rewards[i - WINDOW : i]) >= SATURATED), None)
    if reached is not None:
        then = fmean(lengths[reached - WINDOW : reached])
        numbers |= {"saturated": float(rows[reached - 1]["step"]), "length/saturated": then}
        numbers["length/growth"] = numbers["length/end"] - then
    steps = [int(row["step"]) for row in rows]
    return Course(arm=arm, seed=seed, steps=steps, lengths=lengths, numbers=numbers)


def read_courses(every: Sequence[Run], folder: Path) -> list[Course]:
    """The courses of an ablation's runs, arm by arm; runs without any step are left out.

    Args:
        every: the runs.
        folder: of the ablation.
    """
    found: list[Course] = []
    for run in every:
        place = run_folder(folder, run)
        rows = [row for row in lines_of(place / METRICS_FILE) if "length/mean" in row]
        if rows:
            found.append(course_of(run.arm.name, rows, lines_of(place / COMPLETIONS), seed=run.seed))
    return _against_first([course for group in _by_arm(found).values() for course in group])


def _against_first(courses: Sequence[Course]) -> list[Course]:
    """The courses with the difference of each final length to that of the first arm with the same seed."""
    ends = {course.seed: course.numbers["length/end"] for course in courses if course.arm == courses[0].arm}
    return [
        replace(c, numbers={**c.numbers, "length/against": c.numbers["length/end"] - ends[c.seed]})
        if c.seed in ends and c.arm != courses[0].arm
        else c
        for c in courses
    ]


def markdown(courses: Sequence[Course]) -> str:
    """The table as Markdown: one row per arm, each number a mean over seeds with its interval.

    Args:
        courses: of all runs.
    """
    first = courses[0].arm if courses else ""
    heading = ("arm", "seeds", *(title.format(first=first) for title in COLUMNS.values()))
    lines = [heading, ("---", *("---:" for _ in heading[1:]))]
    for arm, group in _by_arm(courses).items():
        cells = (dict(enumerate(c.numbers[name] for c in group if name in c.numbers)) for name in COLUMNS)
        texts = (cell_text(cell_of(values) if values else None, len(group)) for values in cells)
        lines.append((arm, str(len(group)), *texts))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _by_arm(courses: Sequence[Course]) -> dict[str, list[Course]]:
    found: dict[str, list[Course]] = {}
    for course in courses:
        found.setdefault(course.arm, []).append(course)
    return found


def draw(courses: Sequence[Course]) -> Figure:
    """Draw the length over the steps, one panel per arm: every seed, their mean, and the first arm's mean in grey.

    A triangle marks where the reward had saturated.

    Args:
        courses: of all runs; the first arm is what the others are compared with.
    """
    from matplotlib.figure import Figure

    arms = _by_arm(courses)
    columns = 4
    rows = -(-len(arms) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.3 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    control = _mean(next(iter(arms.values())))
    for panel, (arm, group) in zip(panels, arms.items(), strict=False):
        panel.plot(*control, color="#777777", linewidth=1.2)
        for course in group:
            panel.plot(course.steps[WINDOW - 1 :], _smooth(course.lengths), color=COLOURS[0], alpha=0.3, linewidth=0.9)
            if "saturated" in course.numbers:
                place = (course.numbers["saturated"], course.numbers["length/saturated"])
                panel.plot(*place, marker="v", color=COLOURS[0], markersize=4)
        panel.plot(*_mean(group), color=COLOURS[0], linewidth=1.8)
        tidy(panel, title=named(arm))
    for panel in panels[max(0, len(arms) - columns) : len(arms)]:
        panel.tick_params(labelbottom=True)  # the panel below it may be empty
    for panel in panels[len(arms) :]:
        panel.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(f"tokens per completion, mean of {WINDOW} steps", fontsize=9)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    return [fmean(values[i - WINDOW : i]) for i in range(WINDOW, len(values) + 1)]


def _mean(group: Sequence[Course]) -> tuple[Sequence[int], list[float]]:
    """The mean length at each step that every seed has reached."""
    curves = [_smooth(course.lengths) for course in group]
    means = [fmean(values) for values in zip(*curves, strict=False)]
    return group[0].steps[WINDOW - 1 :][: len(means)], means


def write_saturation(every: Sequence[Run], folder: Path) -> tuple[Path, ...]:
    """Write the table and picture of a study's runs; nothing where none has taken a step.

    Args:
        every: the runs.
        folder: of the ablation.
    """
    courses = read_courses(every, folder)
    if not courses:
        return ()
    (folder / MARKDOWN).write_text(markdown(courses), encoding="utf-8")
    draw(courses).savefig(folder / PICTURE, dpi=110, bbox_inches="tight")
    return folder / MARKDOWN, folder / PICTURE
