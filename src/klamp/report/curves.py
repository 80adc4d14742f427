"""The charts of the page: the metrics of each, and the targets drawn in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from klamp.doctor.alarms_tokens import MISMATCH
from klamp.doctor.columns import as_number
from klamp.doctor.examine import Finding
from klamp.doctor.metrics import METRICS
from klamp.names import KL_NAMES, best_kl
from klamp.report.chart import Chart, Line, Mark, Series
from klamp.report.run import OURS, ReportRun, ScoreFormat, skills_of, slots_of
from klamp.report.text import short

SKILLS = 12


PLANS: tuple[Chart, ...] = (
    Chart(name="reward", title="Reward", unit="reward", curves={"reward": "reward"}),
    Chart(
        name="kl",
        title="KL to the reference",
        unit="nats/token",
        curves={"kl/exact": "exact", "kl/k3": "k3", "kl/k1": "k1", "kl/exact_forward": "exact forward"},
    ),
    Chart(name="anchors", title="Divergence from each anchor", unit="nats/token", curves={}),
    Chart(
        name="kl-completion",
        title="KL per completion",
        unit="nats",
        curves={f"kl/{name}_sequence": name for name in ("exact", "k3", "k1")}
        | {"kl/budget": "budget", "kl/after_clip": "after the clip"},
    ),
    Chart(name="retention", title="Evaluations", unit="score", curves={}),
    Chart(name="beta", title="beta", unit="reward/nat", curves={"beta": "beta", "teacher/coef": "teacher_coef"}),
    Chart(name="length", title="Completion length", unit="tokens", curves={"length/mean": "mean"}),
    Chart(
        name="shares",
        title="Cut and saturated",
        unit="share",
        curves={"length/truncated": "cut", "groups/saturated": "saturated"},
        include=(0.0, 1.0),
    ),
    Chart(name="entropy", title="Entropy", unit="nats/token", curves={"policy/entropy": "entropy"}),
    Chart(
        name="sampler",
        title="Sampler against trainer",
        unit="nats/token",
        curves={"sampler/k3": "k3", "sampler/k1": "k1", "sampler/abs": "|difference|"},
    ),
    Chart(
        name="extremes",
        title="|log policy − log ref|",
        unit="nats",
        curves={"kl/log_ratio_max": "largest of a step", "kl/log_ratio_p99": "99th percentile"},
    ),
    Chart(name="gradient", title="Gradient norm", unit="norm", curves={"train/grad_norm": "norm"}),
    Chart(
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
    """The charts that these runs have data for: all metrics of one run, or per metric a curve of each run."""
    return list(_alone(runs[0], numbers) if len(runs) == 1 else _overlaid(runs))


def plans(runs: Sequence[ReportRun]) -> list[Chart]:
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
    """The metric of the KL to each anchor, with its name; none where the reference is the only anchor."""
    logged = {name for run in runs for name in run.history.names}
    several = any(name.startswith("teacher/kl.") for name in logged)
    curves = {"teacher/kl": "teachers, mean" if several else "teacher"} if "teacher/kl" in logged else {}
    curves |= {name: name.replace("/kl.", " ") for name in sorted(logged) if name.startswith("teacher/kl.")}
    if any(run.config.get("reference") == "sampler" for run in runs):
        curves["policy/kl_old"] = "sampler (k3), at the last update"
    if len(runs) > 1 or not curves:
        return curves
    best = best_kl(logged) or "kl/k3"
    return {best: f"reference ({KL_NAMES[best]})", **curves, "sampler/k3": "sampler (k3)"}


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
            text, lines, marks = _meanings(run, plan), levels_of(run, plan.name), _marks(run, plan, numbers)
            yield replace(plan, name=f"chart-{plan.name}", text=text, series=series, lines=lines, marks=marks)


def _meanings(run: ReportRun, plan: Chart) -> str:
    """The meaning of each metric in a chart; empty for another trainer, whose metrics may mean something else."""
    names = [name for name in plan.curves if name in METRICS and run.curve(name)] if run.history.source == OURS else []
    return " ".join(f"{plan.curves[name]}: {METRICS[name].text.partition('. ')[0].rstrip('.')}." for name in names)


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
                yield replace(
                    plan,
                    name=f"chart-{plan.name}-{list(plan.curves).index(name)}",
                    title=plan.title if alone or label == plan.name else f"{plan.title}: {label}",
                    series=series,
                    lines=_shared_levels(runs, plan.name),
                )


def _shared_levels(runs: Sequence[ReportRun], name: str) -> list[Line]:
    """The targets and budgets that are the same in all runs."""
    each = [levels_of(run, name) for run in runs]
    return [line for line in each[0] if all(line in lines for lines in each[1:])]


def _marks(run: ReportRun, plan: Chart, numbers: Mapping[str, int]) -> list[Mark]:
    return [
        Mark(step=finding.first_step, number=numbers[finding.alarm.name], name=finding.alarm.name)
        for finding in run.diagnosis.findings
        if finding.alarm.level == "alarm" and _concerns(finding, plan)
    ]


def _concerns(finding: Finding, plan: Chart) -> bool:
    needs = {part for need in finding.alarm.needs for part in need.split("|")}
    return bool(needs & plan.curves.keys()) or ("evaluations" in needs and plan.name == "retention")


def levels_of(run: ReportRun, chart: str) -> list[Line]:
    """The lines and bands of a chart; without a known configuration only those of the alarms."""
    if chart == "kl":
        lines = _target(run.config)
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
