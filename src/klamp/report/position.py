"""The KL by the position of tokens in their completions, from written completions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from klamp.diagnostics.history import Completion
from klamp.report.chart import Chart
from klamp.report.run import ReportRun, slots_of
from klamp.report.seeds import Series

STAGES = ("early steps", "middle steps", "late steps")
BINS = 64


def position_charts(runs: Sequence[ReportRun]) -> list[Chart]:
    """Charts of mean k1 and k3 by position: over the stages of one run, or the last stage of several.

    Args:
        runs: those of the report.
    """
    curves = [curve for curve in _stages(runs) if curve.points]
    if not curves:
        return []
    texts = {
        "k3": "Where in a completion the policy left its reference. Tokens that were written down only.",
        "k1": "Mean of log policy − log ref. By position it need not be positive.",
    }
    return [
        Chart(
            name=f"chart-position-{name}",
            title=f"{name} by position",
            unit="nats/token",
            text=texts[name],
            series=[
                Series(
                    label=curve.label,
                    points={place: means[which] for place, means in curve.points.items()},
                    slot=curve.slot,
                    group=curve.group,
                )
                for curve in curves
            ],
            axis="token",
            include=(0.0,),
        )
        for which, name in enumerate(("k3", "k1"))
    ]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    label: str
    points: Mapping[float, tuple[float, float]]
    slot: int
    group: str = ""


def _stages(runs: Sequence[ReportRun]) -> Iterator[_Stage]:
    for run, slot in zip(runs, slots_of(runs), strict=True):
        parts = thirds(sorted(run.history.completions))
        if not parts:
            continue
        if len(runs) > 1:
            late = by_position(each for step in parts[-1] for each in run.history.completions[step])
            yield _Stage(label=run.name, points=late, slot=slot, group=run.group)
            continue
        names = STAGES if len(parts) == len(STAGES) else ("all steps",)
        for number, (name, part) in enumerate(zip(names, parts, strict=True)):
            span = f"{part[0]}–{part[-1]}" if len(part) > 1 else f"{part[0]}"
            completions = (each for step in part for each in run.history.completions[step])
            yield _Stage(label=f"{name} ({span})", points=by_position(completions), slot=number)


def thirds(steps: Sequence[int]) -> list[Sequence[int]]:
    """The steps divided into three stages; one stage where there are fewer than three steps."""
    if len(steps) < 3:
        return [steps] if steps else []
    first, second = len(steps) // 3, 2 * len(steps) // 3
    return [steps[:first], steps[first:second], steps[second:]]


def by_position(completions: Iterable[Completion]) -> dict[float, tuple[float, float]]:
    """Position among the tokens that the model wrote (from 1) -> mean k3 and k1 there.

    Long completions are cut into stretches, each named by its first place.

    Args:
        completions: of some steps.
    """
    sums: dict[int, list[float]] = defaultdict(_nothing)
    for each in completions:
        begin = next((i for i, sampled in enumerate(each.is_sampled) if sampled), 0)
        for position, delta in each.log_ratios():
            _add(sums[position - begin + 1], (1, k3(delta), delta))
    width = math.ceil(max(sums, default=0) / BINS) or 1
    stretches: dict[int, list[float]] = defaultdict(_nothing)
    for place, found in sorted(sums.items()):
        if place > 0:
            _add(stretches[(place - 1) // width * width + 1], found)
    return {float(place): (k3s / count, k1s / count) for place, (count, k3s, k1s) in stretches.items()}


def _nothing() -> list[float]:
    return [0, 0.0, 0.0]


def _add(sums: list[float], more: Sequence[float]) -> None:
    """Add to the count and the two sums of a place."""
    sums[0] += more[0]
    sums[1] += more[1]
    sums[2] += more[2]


def k3(delta: float) -> float:
    """The estimator k3 of one log-ratio, bounded so that its means stay finite."""
    return math.expm1(min(-delta, 600.0)) + delta
