"""Where a step's CPU time goes, phase by phase, for klamp and for TRL."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import isolated
from benchmarks.phases import RULES, Sampler
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table
from benchmarks.step import MODELS, QUICK_SHAPES, QUICK_STEPS, SHAPES, STEPS
from benchmarks.step_runs import TRAINERS, Seen, Setting, write_setting

PLACES, SHOWN = 60, 10
"""So many of the most expensive places are kept of each run, and shown of klamp's own."""


def one(setting: dict[str, Any]) -> dict[str, Any]:
    """A sampled run in this process: CPU seconds per step of each phase, and the most expensive places."""
    given = Setting(**setting)
    sampler = Sampler(RULES[given.trainer])

    class Sampled(Seen):
        def end(self, tokens: float) -> None:
            super().end(tokens)
            if len(self.tokens) == given.warmup:
                sampler.start()
            if len(self.tokens) == given.steps:
                sampler.stop()

    with tempfile.TemporaryDirectory() as folder:
        TRAINERS[given.trainer](given, folder, Sampled())
    steps = given.steps - given.warmup
    places = sampler.places.most_common(PLACES)
    return {
        "phases": {name: spent / steps for name, spent in sampler.phases.most_common()},
        "places": [{"phase": p, "file": f, "function": n, "seconds": spent / steps} for (p, f, n), spent in places],
    }


def run(quick: bool) -> dict[str, Any]:
    """Every model, shape and trainer once."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS[quick]:
            for length in (QUICK_SHAPES if quick else SHAPES).values():
                path, prompts = write_setting(Path(folder), model, length)
                for trainer in RULES:
                    counts = QUICK_STEPS if quick else dict(zip(("steps", "warmup"), STEPS[model], strict=True))
                    setting = Setting(trainer=trainer, model=path, prompts=prompts, **counts)
                    seen = isolated("benchmarks.profiles:one", {"setting": setting.to_dict()})
                    runs.append({"model": model, "prompt": length, "trainer": trainer} | seen)
    return {"runs": runs}


def text(results: Mapping[str, Any]) -> str:
    """Phases side by side, then klamp's most expensive places."""
    runs = results["runs"]
    names = [name for name, _ in _totals(runs)]
    headings = ["phase", *(f"{r['model']}, {r['prompt']}, {r['trainer']}" for r in runs)]
    rows = [(name, *(f"{r['phases'].get(name, 0.0):.3f}" for r in runs)) for name in names]
    rows.append(("step", *(f"{sum(r['phases'].values()):.3f}" for r in runs)))
    parts = [table(headings, rows)]
    for seen in (r for r in runs if r["trainer"] == "klamp"):
        own = [p for p in seen["places"] if p["file"].startswith("klamp/")][:SHOWN]
        places = [(p["phase"], f"`{p['file']}`, `{p['function']}`", f"{p['seconds']:.3f}") for p in own]
        parts.append(f"klamp, {seen['model']}, prompts of {seen['prompt']}, by its own innermost function:")
        parts.append(table(("phase", "function, with what it calls in other packages", "CPU seconds"), places))
    return "\n\n".join(parts)


def _totals(runs: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """The phases, those that cost most over all runs first."""
    names = {name for seen in runs for name in seen["phases"]}
    return sorted(((n, sum(r["phases"].get(n, 0.0) for r in runs)) for n in names), key=lambda pair: -pair[1])


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of the phases of each run."""
    panels = [
        Panel(
            title=f"{r['trainer']}, {r['model']}, prompts {r['prompt']}",
            label="CPU seconds per step",
            bars={("klamp: " if r["trainer"] == "klamp" else "") + name: spent for name, spent in r["phases"].items()},
        )
        for r in results["runs"]
    ]
    draw(panels, file)


BENCHMARK = Benchmark(
    name="profile",
    title="Where a step's time goes: klamp and TRL",
    about="CPU seconds per step, all threads, booked on what the main thread was doing every few milliseconds; the "
    "runs are those of `step`. A sampled step is a little slower than a free one: shares count here, totals there.",
    run=run,
    text=text,
    plot=plot,
)
