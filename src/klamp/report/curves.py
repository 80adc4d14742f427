"""Which charts over steps the page has, and what each takes from a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from klamp.diagnostics.doctor import Finding
from klamp.report.chart import Chart, Line, Mark
from klamp.report.levels import levels_of
from klamp.report.run import ReportRun, skills_of, slots_of
from klamp.report.scores import Scores
from klamp.report.seeds import Series

SKILLS = 12
"""The most skills that get a curve."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A chart that any run can have: which metrics, under which title."""

    name: str
    """The id of the chart, unique on the page."""
    title: str
    """The title, in a few words."""
    unit: str
    """The unit of the values."""
    text: str
    """What the curves say, in a sentence or two."""
    curves: Mapping[str, str]
    """Metric -> its label, the most telling first."""
    include: Sequence[float] = (0.0,)
    """Values that the vertical axis must have room for."""
    decimals: int | None = None
    """Decimals of the values, where they are written with as many everywhere."""


PLANS: tuple[Plan, ...] = (
    Plan(
        name="reward",
        title="Reward",
        unit="reward",
        text="Reward of the task.",
        curves={"reward": "reward"},
    ),
    Plan(
        name="kl",
        title="KL to the reference",
        unit="nats/token",
        text="Estimates of one KL(policy‖ref): exact has no noise, k1 has most of it. Forward is KL(ref‖policy).",
        curves={"kl/exact": "exact", "kl/k3": "k3", "kl/k1": "k1", "kl/exact_forward": "exact forward"},
    ),
    Plan(
        name="kl-completion",
        title="KL per completion",
        unit="nats",
        text="Summed over its tokens: what a longer completion cannot hide.",
        curves={
            "kl/exact_sequence": "exact",
            "kl/k3_sequence": "k3",
            "kl/k1_sequence": "k1",
            "kl/budget": "budget",
            "kl/after_clip": "after the clip",
        },
    ),
    Plan(
        name="retention",
        title="Skills on held-out prompts",
        unit="score",
        text="What is trained, and what should be kept.",
        curves={},
    ),
    Plan(
        name="beta",
        title="beta",
        unit="reward/nat",
        text="Coefficient of the KL in force, per token.",
        curves={"beta": "beta"},
    ),
    Plan(
        name="length",
        title="Completion length",
        unit="tokens",
        text="End token included.",
        curves={"length/mean": "mean"},
    ),
    Plan(
        name="shares",
        title="Cut and saturated",
        unit="share",
        text="Completions cut at the length limit; groups whose rewards are all equal, which teach nothing.",
        curves={"length/truncated": "cut", "groups/saturated": "saturated"},
        include=(0.0, 1.0),
    ),
    Plan(
        name="entropy",
        title="Entropy",
        unit="nats/token",
        text="Of the policy at the prefixes that it sampled.",
        curves={"policy/entropy": "entropy"},
    ),
    Plan(
        name="sampler",
        title="Sampler against trainer",
        unit="nats/token",
        text="Sampler and trainer hold the same weights, so they should agree; up to about 0.002 is healthy.",
        curves={"sampler/k3": "k3", "sampler/k1": "k1", "sampler/abs": "|difference|"},
    ),
    Plan(
        name="extremes",
        title="Largest log-ratios",
        unit="nats",
        text="|log policy − log ref|: the largest of a step, and the 99th percentile.",
        curves={"kl/log_ratio_max": "largest", "kl/log_ratio_p99": "99 %"},
    ),
    Plan(
        name="gradient",
        title="Gradient norm",
        unit="norm",
        text="Before clipping.",
        curves={"train/grad_norm": "norm"},
    ),
    Plan(
        name="loss",
        title="Loss",
        unit="loss",
        text="The policy's part and the KL's part (beta times its penalty).",
        curves={"train/loss": "loss", "train/policy_loss": "policy", "train/kl_penalty": "KL"},
    ),
)


def charts(runs: Sequence[ReportRun], numbers: Mapping[str, int]) -> list[Chart]:
    """The charts that there is data for in these runs.

    Args:
        runs: one: a chart has all its metrics. Several: a chart per metric, with a curve per run.
        numbers: alarm -> its number on the page.
    """
    return list(_alone(runs[0], numbers) if len(runs) == 1 else _overlaid(runs))


def plans(runs: Sequence[ReportRun]) -> list[Plan]:
    """All plans of charts, with one for the skills of these runs."""
    scores = Scores.of(runs)
    skills = {f"eval/{name}": name for name in skills_of(runs)[:SKILLS]}
    trained = {f"eval/{run.history.settings.rl_skill}" for run in runs}
    named = {name: label + (" (trained)" if name in trained else "") for name, label in skills.items()}
    return [plan if plan.curves else _with_curves(plan, named, scores) for plan in PLANS]


def _with_curves(plan: Plan, curves: Mapping[str, str], scores: Scores) -> Plan:
    return replace(plan, curves=curves, unit=scores.unit, include=scores.full, decimals=scores.decimals)


def _curve(run: ReportRun, name: str, scores: Scores) -> dict[float, float]:
    """The values of a metric; those of a skill as scores are written."""
    found = run.curve(name)
    return {step: scores.scaled(value) for step, value in found.items()} if name.startswith("eval/") else found


def _alone(run: ReportRun, numbers: Mapping[str, int]) -> Iterator[Chart]:
    scores = Scores.of([run])
    for plan in plans([run]):
        found = [(label, _curve(run, name, scores), slot) for slot, (name, label) in enumerate(plan.curves.items())]
        series = [Series(label=label, points=points, slot=slot, runs=(0,)) for label, points, slot in found if points]
        if series:
            yield Chart(
                name=f"chart-{plan.name}",
                title=plan.title,
                unit=plan.unit,
                text=plan.text,
                series=series,
                lines=levels_of(run, plan.name),
                marks=_marks(run, plan, numbers),
                include=plan.include,
                decimals=plan.decimals,
            )


def _overlaid(runs: Sequence[ReportRun]) -> Iterator[Chart]:
    scores = Scores.of(runs)
    for plan in plans(runs):
        for name, label in plan.curves.items():
            found = zip(runs, [_curve(run, name, scores) for run in runs], slots_of(runs), strict=True)
            series = [
                Series(label=run.name, points=points, slot=slot, group=run.group, runs=(number,))
                for number, (run, points, slot) in enumerate(found)
                if points
            ]
            if series:
                yield Chart(
                    name=f"chart-{plan.name}-{list(plan.curves).index(name)}",
                    title=plan.title if len(plan.curves) == 1 or label == plan.name else f"{plan.title}: {label}",
                    unit=plan.unit,
                    text=plan.text + _without_curve(runs, plan, name),
                    series=series,
                    lines=_shared_levels(runs, plan.name),
                    include=plan.include,
                    decimals=plan.decimals,
                )


def _without_curve(runs: Sequence[ReportRun], plan: Plan, name: str) -> str:
    """Which arms logged no KL in their steps and have one all the same, as a sentence to add."""
    if plan.name not in ("kl", "kl-completion"):
        return ""
    without = [run for run in runs if run.kl_after is not None and not run.curve(name)]
    names = dict.fromkeys(run.group or run.name for run in without)
    return f" No curve of {', '.join(names)}: measured after training, see Overview." if names else ""


def _shared_levels(runs: Sequence[ReportRun], name: str) -> list[Line]:
    """The targets and budgets that are the same in all runs."""
    each = [levels_of(run, name) for run in runs]
    return [line for line in each[0] if all(line in lines for lines in each[1:])]


def _marks(run: ReportRun, plan: Plan, numbers: Mapping[str, int]) -> list[Mark]:
    return [
        Mark(step=finding.first_step, number=numbers[finding.alarm.name], name=finding.alarm.name)
        for finding in run.diagnosis.findings
        if finding.alarm.level == "alarm" and _concerns(finding, plan)
    ]


def _concerns(finding: Finding, plan: Plan) -> bool:
    needs = {part for need in finding.alarm.needs for part in need.split("|")}
    return bool(needs & plan.curves.keys()) or ("evaluations" in needs and plan.name == "retention")
