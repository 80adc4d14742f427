"""How time and memory grow: heads with tokens and vocabulary, a step with the group and the prompt."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exact import measured_points, panels_of
from benchmarks.measure import middle, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table
from benchmarks.step import measured

HEADS = {
    True: ("naive", "linear_logprobs"),
    False: ("naive", "row chunks", "TRL", "Liger, log-probabilities", "linear_logprobs"),
}
WIDTH = {True: 64, False: 256}
ROWS = {True: (256, 1024), False: (1024, 2048, 4096, 8192, 16_384)}
VOCABS = {True: (4096, 16_384), False: (8192, 16_384, 32_768, 131_072)}
FIXED = {True: (256, 4096), False: (1024, 16_384)}
"""N of the runs over V, and V of those over N."""
MODEL = {True: "tiny", False: "3M"}
GROUPS = {True: (4, 8), False: (4, 8, 16)}
PROMPTS = {True: (32, 128), False: (8, 128, 512, 960)}
FIXED_PROMPT, FIXED_GROUP = {True: 32, False: 512}, 8
NAMES = {
    "N": "heads against the tokens N",
    "V": "heads against the vocabulary V",
    "group size": "a step against the group size",
    "prompt length": "a step against the prompt's length",
}


def run(quick: bool) -> dict[str, Any]:
    """Heads, then steps; the size that two axes share is measured once."""
    rows, vocab = FIXED[quick]
    sizes = [("N", (n, WIDTH[quick], vocab)) for n in ROWS[quick]] + [
        ("V", (rows, WIDTH[quick], v)) for v in VOCABS[quick]
    ]
    points: list[dict[str, Any]] = []
    seen: dict[Any, list[dict[str, Any]]] = {}
    for over, size in sizes:
        if size not in seen:
            seen[size] = measured_points("heads", over, size, HEADS[quick])
        points += [point | {"over": over, "x": size[0 if over == "N" else 2]} for point in seen[size]]
    prompt, group = FIXED_PROMPT[quick], FIXED_GROUP
    steps = [("group size", (g, prompt)) for g in GROUPS[quick]] + [
        ("prompt length", (group, p)) for p in PROMPTS[quick]
    ]
    with tempfile.TemporaryDirectory() as folder:
        for over, shape in steps:
            if shape not in seen:
                seen[shape] = _steps(Path(folder), quick, *shape)
            points += [point | {"over": over, "x": shape[over == "prompt length"]} for point in seen[shape]]
    return {"points": points}


def _steps(folder: Path, quick: bool, group: int, prompt: int) -> list[dict[str, Any]]:
    """One group per step, with every trainer."""
    settings = {"group": group, "prompts_per_step": 1, "steps": 3 if quick else 4, "warmup": 1}
    runs = measured(folder, MODEL[quick], prompt, count=1, settings=settings)
    return [seen | {"theme": "step", "case": seen["trainer"]} for seen in runs]


def exponent(points: Sequence[Mapping[str, Any]], value: str) -> float:
    """How a quantity grows with x between its two largest values: 1 is linear, 0 is flat."""
    (x0, y0), (x1, y1) = sorted((p["x"], p[value] if value == "extra_mib" else middle(p[value])) for p in points)[-2:]
    return math.log(max(y1, 1e-9) / max(y0, 1e-9)) / math.log(x1 / x0)


def text(results: Mapping[str, Any]) -> str:
    """A table per axis, each with the growth at its upper end."""
    parts = []
    for over, name in NAMES.items():
        points = [p for p in results["points"] if p["over"] == over]
        cases = list(dict.fromkeys(p["case"] for p in points))
        rows = []
        for x in sorted({p["x"] for p in points}):
            here = {p["case"]: p for p in points if p["x"] == x}
            rows.append((f"{x:,}", *(f"{spread(here[c]['seconds'])}, {here[c]['extra_mib']:,.0f}" for c in cases)))
        grown = []
        for case in cases:
            own = [p for p in points if p["case"] == case]
            grown.append(f"{exponent(own, 'seconds'):.2f}, {exponent(own, 'extra_mib'):.2f}")
        rows.append(("growth", *grown))
        parts += [f"## {name[0].upper()}{name[1:]}", _where(points[0], over), table((over, *cases), rows)]
    return "\n\n".join(parts)


def _where(point: Mapping[str, Any], over: str) -> str:
    """What was held fixed, and what the cells are."""
    cells = "Seconds, median (range), and extra peak MiB; growth: their exponents between the two largest sizes."
    if point["theme"] == "heads":
        n, h, v = point["size"]
        return f"H = {h}, {f'V = {v:,}' if over == 'N' else f'N = {n:,}'}, float32. {cells}"
    fixed = f"prompts of {point['prompt']} tokens" if over == "group size" else f"groups of {FIXED_GROUP}"
    return f"Model {point['model']}, one group per step, {fixed}. {cells}"


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Time and memory against each of the four."""
    panels: list[Panel] = []
    for over, name in NAMES.items():
        panels += panels_of([p for p in results["points"] if p["over"] == over], over, name)
    draw(panels, file)


BENCHMARK = Benchmark(
    name="scale",
    title="How time and memory grow",
    about="Heads: forward and backward with both gradients, as in `heads`. Steps: whole GRPO steps with KL, as in "
    "`step`, with one group per step. Extra peak memory is what the process held at most above what it held before "
    "the first run.",
    run=run,
    text=text,
    plot=plot,
)
