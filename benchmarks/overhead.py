"""What the KL costs: a step with it less the same step at beta 0, for klamp and for TRL."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import middle, pooled, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step import SHAPES
from benchmarks.step_runs import BETA, COMPLETION, GROUP, Setting, write_setting
from benchmarks.turns import in_turn

TRAINERS = ("trl", "klamp")
TARGET = 2 / 3
WARMUP = 2
SETS = {True: 1, False: 3}
STEPS = {True: {("3M", "short"): 4}, False: {("3M", "short"): 30, ("3M", "long"): 10, ("27M", "short"): 12}}
"""Model and shape of prompts -> rounds that count in a set of processes; a round is a step with KL and one without."""
CLOCKS = {"seconds": "seconds", "cpu_seconds": "CPU seconds"}


def run(quick: bool) -> dict[str, Any]:
    """Both trainers, each with and without KL a step at a time in turn; the trainers' sets of processes in turn too."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for (model, shape), rounds in STEPS[quick].items():
            path, prompts = write_setting(Path(folder), model, SHAPES[shape])
            common = {"model": path, "prompts": prompts, "steps": WARMUP + rounds, "warmup": WARMUP}
            found: dict[tuple[str, float], list[dict[str, Any]]] = {}
            for _ in range(SETS[quick]):
                for trainer in TRAINERS:
                    pair = {f"beta {b}": Setting(trainer=trainer, beta=b, **common) for b in (BETA, 0.0)}
                    for name, seen in in_turn(pair).items():
                        found.setdefault((trainer, pair[name].beta), []).append(seen)
            place = {"model": model, "prompt": SHAPES[shape], "shape": shape, "sets": SETS[quick]}
            for (trainer, beta), sets in found.items():
                runs.append(place | {"trainer": trainer, "beta": beta} | pooled(sets))
    return {"group": GROUP, "completion": COMPLETION, "beta": BETA, "runs": runs}


def costs(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each model, length and trainer: the step with and without KL, and their difference in every round."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for seen in results["runs"]:
        row = found.setdefault((seen["model"], seen["prompt"], seen["trainer"]), {"seen": seen})
        row["without" if seen["beta"] == 0 else "with"] = seen
    for row in found.values():
        for clock in CLOCKS:
            whole, bare = row["with"][clock], row["without"][clock]
            row[clock] = [a - b for a, b in zip(whole, bare, strict=True)]
        row["share"] = middle(row["seconds"]) / middle(row["without"]["seconds"])
        row["extra_mib"] = row["with"]["extra_mib"] - row["without"]["extra_mib"]
    return list(found.values())


def by_set(row: Mapping[str, Any]) -> list[float]:
    """The KL's seconds in each set of processes: the median over its rounds."""
    seconds = row["seconds"]
    size = len(seconds) // row["seen"]["sets"]
    return [middle(seconds[i : i + size]) for i in range(0, len(seconds), size)]


def ratio(own: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The median of one over that of the other, and its 95 % bootstrap interval over rounds, drawn in pairs."""
    import numpy as np
    from scipy import stats

    found = stats.bootstrap(
        (own, other),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return middle(own) / middle(other), float(low), float(high)


def text(results: Mapping[str, Any]) -> str:
    """The table and the targets."""
    rows, verdicts = [], []
    found = costs(results)
    for row in found:
        seen = row["seen"]
        rows.append(
            (
                seen["model"],
                seen["prompt"],
                seen["trainer"],
                len(row["seconds"]),
                spread(row["with"]["seconds"]),
                spread(row["without"]["seconds"]),
                f"{middle(row['seconds']):+.3f} ({row['share']:+.0%})",
                ", ".join(f"{seconds:+.2f}" for seconds in by_set(row)),
                f"{middle(row['cpu_seconds']):+.3f}",
                f"{row['extra_mib']:+,.0f}",
            )
        )
    for own in (row for row in found if row["seen"]["trainer"] == "klamp"):
        where = (own["seen"]["model"], own["seen"]["prompt"])
        other = next(
            r for r in found if r["seen"]["trainer"] == "trl" and (r["seen"]["model"], r["seen"]["prompt"]) == where
        )
        for clock, name in CLOCKS.items():
            value, low, high = ratio(own[clock], other[clock])
            what = f"{where[0]}, prompts of {where[1]}: klamp's overhead over TRL's, {name}"
            verdicts.append(verdict(what, value, TARGET) + f"; 95 % interval {low:.2f} to {high:.2f}")
    headings = ("model", "prompt", "trainer", "rounds", "seconds with KL", "seconds at beta 0", "the KL's seconds")
    more = ("in each set of processes", "its CPU seconds", "its extra peak MiB")
    return table((*headings, *more), rows) + "\n\n" + "\n".join(verdicts)


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of the difference."""
    found = {f"{r['seen']['model']}, prompts {r['seen']['prompt']}, {r['seen']['trainer']}": r for r in costs(results)}
    seconds = {name: middle(row["seconds"]) for name, row in found.items()}
    share = {name: 100 * row["share"] for name, row in found.items()}
    panels = [
        Panel(title="what the KL adds to a step", label="seconds", bars=seconds),
        Panel(title="what the KL adds to a step", label="percent of the step without it", bars=share),
    ]
    draw(panels, file)


BENCHMARK = Benchmark(
    name="overhead",
    title="What the KL adds to a step: klamp and TRL",
    about="The steps of `step` (with 27M parameters those of short prompts only), with KL and at beta 0, where neither "
    "trainer loads a reference. Two processes of a trainer take their steps in turn, one with KL and one without; the "
    "KL's cost is the median of the difference within a round, over all rounds of all sets of processes, for a process "
    "keeps a pace of its own. The intervals of the ratios are bootstraps over rounds. klamp's cost holds the reference "
    "pass, the loss term, the metrics of the KL and the exact KL of one completion per group.",
    run=run,
    text=text,
    plot=plot,
)
