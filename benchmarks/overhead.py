"""What the KL costs: a step with it against the same step at beta 0, for klamp and for TRL."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import middle, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step import MODELS, SHAPES, measured, repetition
from benchmarks.step_runs import BETA, COMPLETION, GROUP

TARGET = 2 / 3
LONG_PROMPTS = ("3M",)
"""Models that are measured on long prompts too; with 27M a step of TRL there takes the better part of a minute."""


def run(quick: bool) -> dict[str, Any]:
    """Both trainers with and without KL; the quick run and the large model take short prompts only."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            seen
            for model in MODELS[quick]
            for shape, length in SHAPES.items()
            if shape == "short" or (model in LONG_PROMPTS and not quick)
            for seen in measured(Path(folder), model, length, betas=(BETA, 0.0), shape=shape, **repetition(quick))
        ]
    return {"group": GROUP, "completion": COMPLETION, "beta": BETA, "runs": runs}


def costs(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each model, length and trainer: the step with and without KL, and the difference of their medians."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for seen in results["runs"]:
        row = found.setdefault((seen["model"], seen["prompt"], seen["trainer"]), {"seen": seen})
        row["without" if seen["beta"] == 0 else "with"] = seen
    for row in found.values():
        for clock in ("seconds", "cpu_seconds"):
            whole, bare = (middle(row[which][clock]) for which in ("with", "without"))
            row[clock] = whole - bare
            row[f"{clock}_share"] = (whole - bare) / bare
        row["extra_mib"] = row["with"]["extra_mib"] - row["without"]["extra_mib"]
    return list(found.values())


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
                spread(row["with"]["seconds"]),
                spread(row["without"]["seconds"]),
                f"{row['seconds']:+.3f} ({row['seconds_share']:+.0%})",
                f"{row['cpu_seconds']:+.3f}",
                f"{row['extra_mib']:+,.0f}",
            )
        )
    for own in (row for row in found if row["seen"]["trainer"] == "klamp"):
        where = (own["seen"]["model"], own["seen"]["prompt"])
        other = next(
            r for r in found if r["seen"]["trainer"] == "trl" and (r["seen"]["model"], r["seen"]["prompt"]) == where
        )
        for clock, name in (("seconds", "seconds"), ("cpu_seconds", "CPU seconds")):
            what = f"{where[0]}, prompts of {where[1]}: klamp's overhead over TRL's, {name}"
            verdicts.append(verdict(what, own[clock] / other[clock], TARGET))
    headings = ("model", "prompt", "trainer", "seconds with KL", "seconds at beta 0", "the KL's seconds")
    return table((*headings, "its CPU seconds", "its extra peak MiB"), rows) + "\n\n" + "\n".join(verdicts)


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of the difference."""
    found = {f"{r['seen']['model']}, prompts {r['seen']['prompt']}, {r['seen']['trainer']}": r for r in costs(results)}
    seconds = {name: row["seconds"] for name, row in found.items()}
    share = {name: 100 * row["seconds_share"] for name, row in found.items()}
    panels = [
        Panel(title="what the KL adds to a step", label="seconds", bars=seconds),
        Panel(title="what the KL adds to a step", label="percent of the step without it", bars=share),
    ]
    draw(panels, file)


BENCHMARK = Benchmark(
    name="overhead",
    title="What the KL adds to a step: klamp and TRL",
    about="Runs of `step` (with 27M parameters the short prompts only), each also at beta 0, where neither trainer "
    "loads a reference. The KL's cost is the difference of the medians, so its error is that of both; CPU seconds are "
    "steadier where other work is running. klamp's holds the reference pass, the loss term, the metrics of the KL and "
    "the exact KL of one completion per group.",
    run=run,
    text=text,
    plot=plot,
)
