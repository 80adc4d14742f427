"""`fast_scoring` in other places than `step` looks at: an adapter, 16 bits, long completions, a large vocabulary."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import middle, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step import FAST_MEMORY, FAST_SECONDS, FAST_TARGETS, NAMES, measured, throughput
from benchmarks.step_runs import LONG

PLACES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "LoRA of rank 16": ("3M", LONG, {"lora_r": 16}),
    "bfloat16": ("3M", LONG, {"dtype": "bfloat16"}),
    "completions of 512": ("3M", 128, {"completion": 512, "steps": 4, "warmup": 1}),
    "vocabulary of 151,936": ("wide", 128, {"prompts_per_step": 1, "steps": 3, "warmup": 1}),
}
"""Place -> model, tokens of a prompt, what else differs from a run of `step`."""
QUICK_PLACES: dict[str, tuple[str, int, dict[str, Any]]] = {
    name: ("tiny", 64, {"steps": 2, "warmup": 1} | given)
    for name, given in (("LoRA of rank 4", {"lora_r": 4}), ("bfloat16", {"dtype": "bfloat16"}))
}


def run(quick: bool) -> dict[str, Any]:
    """Every trainer in every place, in turn."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, length, settings) in (QUICK_PLACES if quick else PLACES).items():
            given = {"steps": 6, "warmup": 2} | settings
            found[name] = measured(Path(folder), model, length, count=1, settings=given)
    return {"places": found}


def text(results: Mapping[str, Any]) -> str:
    """A row per place and trainer, and the targets."""
    verdicts = [line for name, runs in results["places"].items() for line in _verdicts(name, by_trainer(runs))]
    return compared(results["places"]) + "\n\n" + "\n".join(verdicts)


def by_trainer(runs: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The runs of a place by their trainers."""
    return {seen["trainer"]: seen for seen in runs}


def compared(places: Mapping[str, Sequence[Mapping[str, Any]]], names: Mapping[str, str] = NAMES) -> str:
    """A table with a row per place and trainer, each by its name and against TRL's there."""
    rows = []
    for name, runs in places.items():
        here = by_trainer(runs)
        for trainer, seen in here.items():
            rate = throughput(seen) / throughput(here["trl"])
            cells = (f"{rate:.2f}×", f"{middle(seen['cpu_seconds']):.2f}", f"{seen['extra_mib']:,.0f}")
            rows.append((name, seen["model"], seen["prompt"], names[trainer], spread(seen["seconds"]), *cells))
    headings = ("where", "model", "prompt", "trainer", "seconds per step, median (range)", "against TRL")
    return table((*headings, "CPU seconds", "extra peak MiB"), rows)


def _verdicts(name: str, here: Mapping[str, Mapping[str, Any]]) -> list[str]:
    fast, stock, own = here["fast"], here["trl"], here["klamp"]
    rate, seconds = throughput(fast) / throughput(stock), middle(fast["seconds"]) / middle(own["seconds"])
    least = FAST_TARGETS["long" if fast["prompt"] >= LONG else "short"]
    return [
        verdict(f"{name}: throughput over TRL's", rate, least, at_least=True),
        verdict(f"{name}: extra memory over TRL's", fast["extra_mib"] / stock["extra_mib"], FAST_MEMORY),
        verdict(f"{name}: seconds over those of klamp train", seconds, FAST_SECONDS),
    ]


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Throughput over TRL's, for each place and trainer."""
    rate = {
        f"{name}, {NAMES[seen['trainer']]}": throughput(seen) / throughput(runs[0])
        for name, runs in results["places"].items()
        for seen in runs
    }
    draw([Panel(title="fast_scoring where else", label="throughput over TRL's", bars=rate)], file)


BENCHMARK = Benchmark(
    name="elsewhere",
    title="fast_scoring in other places: an adapter, 16 bits, long completions, a large vocabulary",
    about="As `step`, with what is named changed. In bfloat16 the weights are in that type; klamp train keeps float32 "
    "ones beside them for its optimizer, TRL does not. The model with the large vocabulary is 896 wide and has two "
    "layers; its step is one prompt of 8 completions.",
    run=run,
    text=text,
    plot=plot,
)
