"""The charts of the page: which curves each has, its targets and alarms, and its frame with legend and table.

The script of the page draws a chart from its table and from `data-plot`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from klamp.doctor.alarms_tokens import MISMATCH
from klamp.doctor.examine import AlarmFinding
from klamp.doctor.metrics import METRICS, as_number
from klamp.names import KL_NAMES, best_kl
from klamp.report.run import OURS, ReportRun, ScoreFormat, skills_of, slots_of
from klamp.report.text import Html, count, element, plain_table, rounded, short

DIGITS = 6
"""Significant digits of the numbers in the table, which the script draws from."""
SKILLS = 12
TITLES: Mapping[str, str] = {
    "reward": "Reward",
    "kl": "KL to the reference",
    "anchors": "Divergence from each anchor",
    "kl-completion": "KL per completion",
    "retention": "Evaluations",
    "beta": "beta",
    "length": "Completion length",
    "shares": "Cut and saturated",
    "entropy": "Entropy",
    "sampler": "Sampler against trainer",
    "extremes": "|log policy − log ref|",
    "gradient": "Gradient norm",
    "loss": "Loss",
}
"""Chart, as the rows of `METRICS` name it -> its title, in the order of the page; two have curves of their own. A chart
that is not named here comes after them, under its own name."""


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


@dataclass(frozen=True)
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
    title, desc = f"{chart.name}-title", f"{chart.name}-text"
    caption = f"{chart.title}{f' ({chart.unit})' * bool(chart.unit)}{thinned}"
    summary = element("summary", "Numbers", element("span", f" of: {caption}", class_="unseen"))
    words = element("title", chart.title, id=title), element("desc", describe(chart), id=desc)
    drawing = element("svg", *words, class_="chart", role="img", aria_labelledby=f"{title} {desc}")
    table = plain_table(headings, rows, caption=caption, classes="numbers")
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", chart.title, id=f"{chart.name}-heading"),
            element("span", chart.unit, class_="unit"),
            element("span", f"last: step {short(steps[-1], digits=9)}" if steps else "", class_="at"),
        ),
        element("ul", *_legend(chart), class_="legend"),
        element("div", drawing, class_="plot", hidden=True),
        element("p", chart.text, class_="says", hidden=not chart.text),
        element("details", summary, table, class_="data"),
        id=chart.name,
        class_="card",
        aria_labelledby=f"{chart.name}-heading",
        data_plot=_plot(chart),
    )


def _plot(chart: Chart) -> str:
    """What the script draws the chart from, besides its table."""
    plot = {
        "unit": chart.unit,
        "include": [*chart.include],
        "decimals": chart.decimals,
        "slots": [series.slot for series in chart.series],
        "lines": [[line.low, line.high] for line in chart.lines],
        "marks": [mark[:2] for mark in chart.marks],
    }
    return json.dumps(plot, separators=(",", ":"), allow_nan=False)


def thin(curves: Sequence[Mapping[float, float]], *, most: int) -> list[float]:
    """The steps to draw: all of them, or for long curves those with the extremes of each stretch."""
    steps = sorted({step for curve in curves for step in curve})
    if len(steps) <= most:
        return steps
    kept_steps = {steps[0], steps[-1]}
    size = math.ceil(len(steps) / max(1, most // (2 * len(curves))))
    for start in range(0, len(steps), size):
        for curve in curves:
            stretch = [step for step in steps[start : start + size] if step in curve]
            finite = [step for step in stretch if math.isfinite(curve[step])]
            if finite:
                kept_steps |= {min(finite, key=lambda s: curve[s]), max(finite, key=lambda s: curve[s])}
            kept_steps |= set(stretch) - set(finite)
    return sorted(kept_steps)


def describe(chart: Chart) -> str:
    """The chart in words, for readers who cannot see it; the numbers are in the table below it."""
    parts = [chart.text] * bool(chart.text)
    for series in chart.series:
        finite = {step: value for step, value in series.points.items() if math.isfinite(value)}
        ends = dict.fromkeys((min(finite), max(finite))) if finite else ()
        parts += [f"{series.label}: {short(finite[step])} at step {short(step, digits=9)}." for step in ends]
        infinite = len(series.points) - len(finite)
        parts += [f"{series.label}: {count(infinite, 'value')} not finite."] if infinite else []
    parts += [f"{line.label}." for line in chart.lines]
    return " ".join(parts + [f"Alarm {mark.number}, {mark.name}, rose at step {mark.step}." for mark in chart.marks])


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


# which charts a page has ----------------------------------------------------------------------------------------------


def charts(runs: Sequence[ReportRun], numbers: Mapping[str, int]) -> list[Chart]:
    """The charts that these runs have data for: all metrics of one run, or per metric a curve of each run."""
    return list(_alone(runs[0], numbers) if len(runs) == 1 else _overlaid(runs))


def plans(runs: Sequence[ReportRun]) -> Iterator[Chart]:
    """All charts without their series: the curves of the table of metrics, of these runs' skills and anchors."""
    scores = ScoreFormat.of(runs)
    trained = {run.history.settings.rl_skill for run in runs}
    skills = {f"eval/{name}": name + (" (trained)" if name in trained else "") for name in skills_of(runs)[:SKILLS]}
    named = [row.shown["chart"] for row in METRICS.values() if row.shown.get("chart", "") not in {"", *TITLES}]
    for name, title in {**TITLES, **{name: name.replace("-", " ").capitalize() for name in named}}.items():
        rows = [row for row in METRICS.values() if row.shown.get("chart") == name]
        if name == "retention":
            yield Chart(name, title, scores.unit, skills, scores.full, scores.decimals)
        elif name == "anchors":
            yield Chart(name, title, "nats/token", anchor_curves(runs))
        else:
            include = (0.0, 1.0) if rows[0].unit == "share" else (0.0,)
            unit = "" if rows[0].unit in title.lower() else rows[0].unit  # not "Loss loss"
            yield Chart(name, title, unit, {row.name: row.label for row in rows}, include)


def anchor_curves(runs: Sequence[ReportRun]) -> dict[str, str]:
    """The metric of the KL to each anchor, with its name; none where the reference is the only anchor."""
    logged = {name for run in runs for name in run.history.names}
    several = any(name.startswith("teacher/kl.") for name in logged)
    curves = {"teacher/kl": "teachers, mean" if several else "teacher"} if "teacher/kl" in logged else {}
    curves |= {name: name.replace("/kl.", " ") for name in sorted(logged) if name.startswith("teacher/kl.")}
    if any(run.history.config.get("reference") == "sampler" for run in runs):
        curves["policy/kl_old"] = "sampler (k3), at the last update"
    if len(runs) > 1 or not curves:
        return curves
    best = best_kl(logged) or "kl/k3"
    return {best: f"reference ({KL_NAMES[best]})", **curves, "sampler/k3": "sampler (k3)"}


def _curve(run: ReportRun, name: str, scores: ScoreFormat) -> dict[float, float]:
    """The values of a metric; a skill's in the format of scores."""
    values = run.curve(name)
    return {step: scores.scaled(value) for step, value in values.items()} if name.startswith("eval/") else values


def _alone(run: ReportRun, numbers: Mapping[str, int]) -> Iterator[Chart]:
    scores = ScoreFormat.of([run])
    for plan in plans([run]):
        curves = [(label, _curve(run, name, scores), slot) for slot, (name, label) in enumerate(plan.curves.items())]
        series = [Series(label=label, points=points, slot=slot) for label, points, slot in curves if points]
        if series:
            text, lines, marks = _meanings(run, plan), levels_of(run, plan.name), _marks(run, plan, numbers)
            yield replace(plan, name=f"chart-{plan.name}", text=text, series=series, lines=lines, marks=marks)


def _meanings(run: ReportRun, plan: Chart) -> str:
    """The meaning of each metric in a chart; empty for another trainer, whose metrics may mean something else."""
    names = [name for name in plan.curves if name in METRICS and run.curve(name)] if run.history.source == OURS else []
    return " ".join(f"{plan.curves[name]}: {METRICS[name].text.partition('. ')[0].rstrip('.')}." for name in names)


def _overlaid(runs: Sequence[ReportRun]) -> Iterator[Chart]:
    scores = ScoreFormat.of(runs)
    for plan in plans(runs):
        levels = [levels_of(run, plan.name) for run in runs]
        alone = len(plan.curves) == 1 and plan.name != "anchors"
        for name, label in plan.curves.items():
            curves = zip(runs, [_curve(run, name, scores) for run in runs], slots_of(runs), strict=True)
            series = [
                Series(label=run.name, points=points, slot=slot, group=run.group)
                for run, points, slot in curves
                if points
            ]
            if series:
                yield replace(
                    plan,
                    name=f"chart-{plan.name}-{list(plan.curves).index(name)}",
                    title=plan.title if alone or label == plan.name else f"{plan.title}: {label}",
                    series=series,
                    lines=[line for line in levels[0] if all(line in lines for lines in levels[1:])],
                )


def _marks(run: ReportRun, plan: Chart, numbers: Mapping[str, int]) -> list[Mark]:
    return [
        Mark(step=finding.first_step, number=numbers[finding.alarm.name], name=finding.alarm.name)
        for finding in run.diagnosis.findings
        if finding.alarm.level == "alarm" and _concerns(finding, plan)
    ]


def _concerns(finding: AlarmFinding, plan: Chart) -> bool:
    needs = {part for need in finding.alarm.needs for part in need.split("|")}
    return bool(needs & plan.curves.keys()) or ("evaluations" in needs and plan.name == "retention")


def levels_of(run: ReportRun, chart: str) -> list[Line]:
    """The lines and bands of a chart; without a known configuration only the alarms' lines."""
    if chart == "kl":
        lines = _target(run.history.config)
        return [replace(line, label=f"{line.label}, at the end") for line in lines] if run.history.changes else lines
    if chart == "sampler" and any(run.curve(f"sampler/{estimate}") for estimate in ("k1", "k3")):
        return [Line(label=f"k1, k3: alarm above {short(MISMATCH.value)}", low=MISMATCH.value)]
    return []


def _target(config: Mapping[str, Any]) -> list[Line]:
    target = as_number(config.get("target_kl"))
    if target is None:
        return []
    lines = [Line(label=f"target {short(target)}", low=target)]
    if config.get("kl_controller") == "step" and config.get("beta") != 0 and config.get("kl_controller_factors"):
        _, _, above, below = config["kl_controller_factors"]
        low, high = below * target, above * target
        lines.insert(0, Line(label=f"beta rests from {short(low)} to {short(high)}", low=low, high=high))
    return lines
