"""How far a step is from the products that it cannot do without, over group size, lengths, model and adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.floor import PHASES
from benchmarks.measure import middle, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict
from benchmarks.step import FLOOR, FLOOR_TARGETS, NAMES, TRAINERS, measured, over_floor

CASES = (*TRAINERS, FLOOR)
BASE = {"model": "3M", "prompt": 128, "group": 8, "completion": 64, "lora_r": 0}
"""The sizes from which one is varied at a time; two prompts a step."""
AXES: dict[str, tuple[Any, ...]] = {
    "group": (2, 8, 32),
    "prompt": (8, 128, 512),
    "completion": (16, 64, 256),
    "model": ("3M", "27M"),
    "lora_r": (0, 16),
}
QUICK: dict[str, tuple[Any, ...]] = {"prompt": (8, 64)}
TITLES = {
    "group": "completions per prompt",
    "prompt": "tokens of a prompt",
    "completion": "tokens of a completion",
    "model": "parameters of the model",
    "lora_r": "rank of an adapter on every linear layer (0: all weights are trained)",
}


def run(quick: bool) -> dict[str, Any]:
    """Every size once; the one that the axes share is measured once."""
    base, axes = (BASE | {"model": "tiny"}, QUICK) if quick else (BASE, AXES)
    points: list[dict[str, Any]] = []
    seen: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for over, values in axes.items():
            for x in values:
                sizes = base | {over: x}
                key = tuple(sizes.values())
                if key not in seen:
                    seen[key] = _measured(Path(folder), quick, **sizes)
                points += [point | {"over": over, "x": x} for point in seen[key]]
    return {"base": base, "points": points}


def _measured(folder: Path, quick: bool, *, model: str, prompt: int, **sizes: Any) -> list[dict[str, Any]]:
    """Every case at one size, in turn."""
    steps = {"steps": 3, "warmup": 1} if quick else {"steps": 5, "warmup": 2}
    return measured(folder, model, prompt, count=1, cases=CASES, settings=steps | sizes)


def text(results: Mapping[str, Any]) -> str:
    """A table per axis: seconds of a step, and how often the floor fits into them."""
    parts = []
    for over in dict.fromkeys(point["over"] for point in results["points"]):
        points = [point for point in results["points"] if point["over"] == over]
        rows = []
        for x in dict.fromkeys(point["x"] for point in points):
            here = {point["trainer"]: point for point in points if point["x"] == x}
            rows.append((f"{x:,}" if isinstance(x, int) else x, *(_cell(here, case) for case in CASES)))
        parts += [f"## Over the {TITLES[over]}", _fixed(results["base"], over)]
        parts.append(table((over, *(NAMES[case] for case in CASES)), rows))
    parts += ["\n".join(_verdicts(results["points"])), "## What the products are", _phases(results["points"])]
    return "\n\n".join(parts)


def _verdicts(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The target of klamp's trainer at every size that has one, each size once."""
    seen = [point for point in points if point["model"] in FLOOR_TARGETS]
    lines: dict[tuple[str, float], str] = {}
    for own in (point for point in seen if point["trainer"] == "klamp"):
        least = next(p for p in seen if p["trainer"] == FLOOR and (p["over"], p["x"]) == (own["over"], own["x"]))
        where = f"{own['model']}, {own['over']} {own['x']}" if own["over"] != "model" else own["x"]
        ratio = middle(own["seconds"]) / middle(least["seconds"])
        what = f"{where}: klamp's seconds over the products alone"
        lines.setdefault((own["model"], ratio), verdict(what, ratio, FLOOR_TARGETS[own["model"]]))
    return list(lines.values())


def _cell(here: Mapping[str, Mapping[str, Any]], case: str) -> str:
    seconds = spread(here[case]["seconds"])
    return seconds if case == FLOOR else f"{seconds}, {over_floor(here, case)}"


def _fixed(base: Mapping[str, Any], over: str) -> str:
    others = ", ".join(f"{name} {value}" for name, value in base.items() if name != over)
    return f"At {others}. Seconds per step, median (range), and over the products alone."


def _phases(points: Sequence[Mapping[str, Any]]) -> str:
    """Seconds of each phase of every floor."""
    floors = {(point["over"], point["x"]): point["phases"] for point in points if point["trainer"] == FLOOR}
    rows = [
        (f"{over} {x}", *(f"{middle(phases[phase]):.3f}" for phase in PHASES)) for (over, x), phases in floors.items()
    ]
    return table(("seconds", *PHASES), rows)


def plot(results: Mapping[str, Any], file: Path) -> None:
    """How often the floor fits into a step, over every axis of numbers."""
    panels = []
    for over in dict.fromkeys(point["over"] for point in results["points"]):
        points = [p for p in results["points"] if p["over"] == over and over not in ("model", "lora_r")]
        floors = {point["x"]: middle(point["seconds"]) for point in points if point["trainer"] == FLOOR}
        lines = {
            NAMES[case]: [(p["x"], middle(p["seconds"]) / floors[p["x"]]) for p in points if p["trainer"] == case]
            for case in TRAINERS
        }
        if floors:
            title = f"a step against the {TITLES[over]}"
            panels.append(Panel(title=title, label="seconds over those of the products", over=over, lines=lines))
    draw(panels, file)


BENCHMARK = Benchmark(
    name="floor",
    title="A step over the products that it cannot do without",
    about="Models, trainers and settings of `step`, two prompts a step, with one size changed at a time; products and "
    "attention in a process of their own, in turn with the trainers.",
    run=run,
    text=text,
    plot=plot,
)
