"""Which charts the page has, over steps and by position; what each takes from a run, and the targets drawn in it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from klamp.config.choices import STEP_FACTORS
from klamp.diagnostics.alarms_tokens import k3
from klamp.diagnostics.causes import MISMATCH
from klamp.diagnostics.doctor import Finding
from klamp.diagnostics.history import Completion
from klamp.diagnostics.metrics import METRICS
from klamp.diagnostics.names import as_number
from klamp.report.axes import Series
from klamp.report.chart import Chart, Line, Mark
from klamp.report.completions import BINS
from klamp.report.headlines import KL
from klamp.report.run import OURS, ReportRun, ScoreFormat, skills_of, slots_of
from klamp.report.text import short

SKILLS = 12
"""The most skills that get a curve."""


@dataclass(frozen=True, kw_only=True)
class ChartPlan:
    """A chart that any run can have: which metrics, under which title."""

    name: str
    """The id of the chart, unique on the page."""
    title: str
    """The title, in a few words."""
    unit: str
    """The unit of the values."""
    curves: Mapping[str, str]
    """Metric -> its label, the most telling first."""
    include: Sequence[float] = (0.0,)
    """Values that the vertical axis must have room for."""
    decimals: int | None = None
    """Decimals of the values, where they are written with as many everywhere."""


PLANS: tuple[ChartPlan, ...] = (
    ChartPlan(
        name="reward",
        title="Reward",
        unit="reward",
        curves={"reward": "reward"},
    ),
    ChartPlan(
        name="kl",
        title="KL to the reference",
        unit="nats/token",
        curves={"kl/exact": "exact", "kl/k3": "k3", "kl/k1": "k1", "kl/exact_forward": "exact forward"},
    ),
    ChartPlan(
        name="anchors",
        title="Divergence from each anchor",
        unit="nats/token",
        curves={},
    ),
    ChartPlan(
        name="kl-completion",
        title="KL per completion",
        unit="nats",
        curves={
            "kl/exact_sequence": "exact",
            "kl/k3_sequence": "k3",
            "kl/k1_sequence": "k1",
            "kl/budget": "budget",
            "kl/after_clip": "after the clip",
        },
    ),
    ChartPlan(
        name="retention",
        title="Evaluations",
        unit="score",
        curves={},
    ),
    ChartPlan(
        name="beta",
        title="beta",
        unit="reward/nat",
        curves={"beta": "beta", "teacher/coef": "teacher_coef"},
    ),
    ChartPlan(
        name="length",
        title="Completion length",
        unit="tokens",
        curves={"length/mean": "mean"},
    ),
    ChartPlan(
        name="shares",
        title="Cut and saturated",
        unit="share",
        curves={"length/truncated": "cut", "groups/saturated": "saturated"},
        include=(0.0, 1.0),
    ),
    ChartPlan(
        name="entropy",
        title="Entropy",
        unit="nats/token",
        curves={"policy/entropy": "entropy"},
    ),
    ChartPlan(
        name="sampler",
        title="Sampler against trainer",
        unit="nats/token",
        curves={"sampler/k3": "k3", "sampler/k1": "k1", "sampler/abs": "|difference|"},
    ),
    ChartPlan(
        name="extremes",
        title="|log policy − log ref|",
        unit="nats",
        curves={"kl/log_ratio_max": "largest of a step", "kl/log_ratio_p99": "99th percentile"},
    ),
    ChartPlan(
        name="gradient",
        title="Gradient norm",
        unit="norm",
        curves={"train/grad_norm": "norm"},
    ),
    ChartPlan(
        name="loss",
        title="Loss",
        unit="loss",
        curves={
            "train/loss": "loss",
            "train/policy_loss": "policy",
            "train/kl_penalty": "KL",
            "train/teacher_penalty": "teacher",
        },
    ),
)


def charts(runs: Sequence[ReportRun], numbers: Mapping[str, int]) -> list[Chart]:
    """The charts that there is data for in these runs.

    Args:
        runs: one: a chart has all its metrics. Several: a chart per metric, with a curve per run.
        numbers: alarm -> its number on the page.
    """
    return list(_alone(runs[0], numbers) if len(runs) == 1 else _overlaid(runs))


def plans(runs: Sequence[ReportRun]) -> list[ChartPlan]:
    """All plans of charts, with those for the skills and the anchors of these runs."""
    scores = ScoreFormat.of(runs)
    skills = {f"eval/{name}": name for name in skills_of(runs)[:SKILLS]}
    trained = {f"eval/{run.history.settings.rl_skill}" for run in runs}
    named = {name: label + (" (trained)" if name in trained else "") for name, label in skills.items()}
    own = {
        "retention": {"curves": named, "unit": scores.unit, "include": scores.full, "decimals": scores.decimals},
        "anchors": {"curves": anchor_curves(runs)},
    }
    return [replace(plan, **own.get(plan.name, {})) for plan in PLANS]


def anchor_curves(runs: Sequence[ReportRun]) -> dict[str, str]:
    """The metric of the KL to each anchor, with its name; none where the reference is the only anchor.

    Args:
        runs: one; of several, what has a chart elsewhere is left out.
    """
    logged = {name for run in runs for name in run.history.names}
    several = any(name.startswith("teacher/kl.") for name in logged)
    curves = {"teacher/kl": "teachers, mean" if several else "teacher"} if "teacher/kl" in logged else {}
    curves |= {name: name.replace("/kl.", " ") for name in sorted(logged) if name.startswith("teacher/kl.")}
    if any(run.config.get("reference") == "sampler" for run in runs):
        curves["policy/kl_old"] = "sampler (k3), at the last update"
    if len(runs) > 1 or not curves:
        return curves
    best = next((name for name in KL if name in logged), "kl/k3")
    return {best: f"reference ({KL[best]})", **curves, "sampler/k3": "sampler (k3)"}


def _curve(run: ReportRun, name: str, scores: ScoreFormat) -> dict[float, float]:
    """The values of a metric; those of a skill as scores are written."""
    found = run.curve(name)
    return {step: scores.scaled(value) for step, value in found.items()} if name.startswith("eval/") else found


def _alone(run: ReportRun, numbers: Mapping[str, int]) -> Iterator[Chart]:
    scores = ScoreFormat.of([run])
    for plan in plans([run]):
        found = [(label, _curve(run, name, scores), slot) for slot, (name, label) in enumerate(plan.curves.items())]
        series = [Series(label=label, points=points, slot=slot) for label, points, slot in found if points]
        if series:
            yield Chart(
                name=f"chart-{plan.name}",
                title=plan.title,
                unit=plan.unit,
                text=" ".join([*_meanings(run, plan), *_scatter(run, plan)]),
                series=series,
                lines=levels_of(run, plan.name),
                marks=_marks(run, plan, numbers),
                include=plan.include,
                decimals=plan.decimals,
            )


def _meanings(run: ReportRun, plan: ChartPlan) -> list[str]:
    """What the metrics of a chart are, where klamp computed them; those of other trainers may be others."""
    names = [name for name in plan.curves if name in METRICS and run.curve(name)] if run.history.source == OURS else []
    return [f"{plan.curves[name]}: {METRICS[name].text.partition('. ')[0].rstrip('.')}." for name in names]


def _scatter(run: ReportRun, plan: ChartPlan) -> list[str]:
    """How far each estimate was from the exact KL, over the steps that have both."""
    exact, said = run.curve("kl/exact") if plan.name == "kl" else {}, list[str]()
    for name in ("k3", "k1"):
        curve = run.curve(f"kl/{name}")
        steps = [step for step in curve if math.isfinite(curve[step]) and math.isfinite(exact.get(step, math.nan))]
        if len(steps) > 1:
            size = math.dist([curve[step] for step in steps], [exact[step] for step in steps]) / math.sqrt(len(steps))
            said.append(f"{name} {short(size, digits=2)}")
    return [f"Distance to exact, root mean square over steps: {', '.join(said)}."] if said else []


def _overlaid(runs: Sequence[ReportRun]) -> Iterator[Chart]:
    scores = ScoreFormat.of(runs)
    for plan in plans(runs):
        alone = len(plan.curves) == 1 and plan.name != "anchors"
        for name, label in plan.curves.items():
            found = zip(runs, [_curve(run, name, scores) for run in runs], slots_of(runs), strict=True)
            series = [
                Series(label=run.name, points=points, slot=slot, group=run.group)
                for run, points, slot in found
                if points
            ]
            if series:
                yield Chart(
                    name=f"chart-{plan.name}-{list(plan.curves).index(name)}",
                    title=plan.title if alone or label == plan.name else f"{plan.title}: {label}",
                    unit=plan.unit,
                    series=series,
                    lines=_shared_levels(runs, plan.name),
                    include=plan.include,
                    decimals=plan.decimals,
                )


def _shared_levels(runs: Sequence[ReportRun], name: str) -> list[Line]:
    """The targets and budgets that are the same in all runs."""
    each = [levels_of(run, name) for run in runs]
    return [line for line in each[0] if all(line in lines for lines in each[1:])]


def _marks(run: ReportRun, plan: ChartPlan, numbers: Mapping[str, int]) -> list[Mark]:
    return [
        Mark(step=finding.first_step, number=numbers[finding.alarm.name], name=finding.alarm.name)
        for finding in run.diagnosis.findings
        if finding.alarm.level == "alarm" and _concerns(finding, plan)
    ]


def _concerns(finding: Finding, plan: ChartPlan) -> bool:
    needs = {part for need in finding.alarm.needs for part in need.split("|")}
    return bool(needs & plan.curves.keys()) or ("evaluations" in needs and plan.name == "retention")


def levels_of(run: ReportRun, chart: str) -> list[Line]:
    """The lines and bands of a chart; without a known configuration only those of the alarms.

    Args:
        run: whose configuration counts.
        chart: name of the plan.
    """
    if chart == "kl":
        lines = _target(run.config)
        return [replace(line, label=f"{line.label}, at the end") for line in lines] if run.history.changes else lines
    if chart == "sampler" and any(run.curve(f"sampler/{estimate}") for estimate in ("k1", "k3")):
        return [Line(label=f"k1, k3: alarm above {short(MISMATCH.value)}", low=MISMATCH.value)]
    if chart == "kl-completion" and not run.curve("kl/budget"):
        return _budget(run)
    return []


def _target(config: Mapping[str, Any]) -> list[Line]:
    target = as_number(config.get("target_kl"))
    if target is None:
        return []
    lines = _level(config, "target_kl", "target")
    if config.get("kl_controller") == "step" and config.get("beta") != 0:
        _, _, above, below = config.get("kl_controller_factors") or STEP_FACTORS
        low, high = below * target, above * target
        lines.insert(0, Line(label=f"beta rests from {short(low)} to {short(high)}", low=low, high=high))
    return lines


def _level(config: Mapping[str, Any], name: str, label: str) -> list[Line]:
    value = as_number(config.get(name))
    return [] if value is None else [Line(label=f"{label} {short(value)}", low=value)]


def _budget(run: ReportRun) -> list[Line]:
    config = run.config
    threshold = as_number(config.get("kl_clip_threshold"))
    if config.get("kl_clip_method") not in ("hard", "soft") or threshold is None:
        return []
    if config.get("use_per_token_kl_threshold", True):
        logged = list(run.curve("kl/reference_length").values())
        length = logged[-1] if logged else as_number(config.get("kl_reference_length"))
        if length is None:
            return []
        threshold *= length
    return [Line(label=f"budget {short(threshold)}", low=threshold)]


def position_charts(runs: Sequence[ReportRun]) -> list[Chart]:
    """The chart of mean k3 by position, if any: over the stages of one run, or the last stage of several.

    Args:
        runs: those of the report.
    """
    series = [
        Series(label=label, points=points, slot=slot, group=group)
        for label, completions, slot, group in _stages(runs)
        if (points := by_position(completions))
    ]
    chart = Chart(
        name="chart-position",
        title="k3 by position",
        unit="nats/token",
        text="Means over the trained tokens that were written"
        + (" in the last third of the steps that have some, or in fewer than three." if len(runs) > 1 else "."),
        series=series,
        axis="token",
        include=(0.0,),
    )
    return [chart] if series else []


def _stages(runs: Sequence[ReportRun]) -> Iterator[tuple[str, Iterable[Completion], int, str]]:
    """The curves by position: label, completions, slot, group."""
    for run, slot in zip(runs, slots_of(runs), strict=True):
        parts = thirds(sorted(run.history.completions))
        for number, part in enumerate(parts):
            completions = (each for step in part for each in run.history.completions[step])
            span = f"steps {part[0]}–{part[-1]}" if len(part) > 1 else f"step {part[0]}"
            if len(runs) == 1:
                yield span, completions, number, ""
            elif number == len(parts) - 1:
                yield run.name, completions, slot, run.group


def thirds(steps: Sequence[int]) -> list[Sequence[int]]:
    """The steps divided into three stages; one stage where there are fewer than three steps."""
    if len(steps) < 3:
        return [steps] if steps else []
    first, second = len(steps) // 3, 2 * len(steps) // 3
    return [steps[:first], steps[first:second], steps[second:]]


def by_position(completions: Iterable[Completion]) -> dict[float, float]:
    """Position among the tokens that the model wrote (from 1) -> mean k3 there.

    Long completions are cut into stretches, each named by its first place.

    Args:
        completions: of some steps.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for each in completions:
        begin = next((i for i, sampled in enumerate(each.is_sampled) if sampled), 0)
        for position, delta in each.log_ratios():
            found[position - begin + 1].append(k3(delta))
    width = math.ceil(max(found, default=0) / BINS) or 1
    stretches: dict[int, list[float]] = defaultdict(list)
    for place, values in sorted(found.items()):
        if place > 0:
            stretches[(place - 1) // width * width + 1] += values
    return {float(place): fmean(values) for place, values in stretches.items()}
