"""The exact full-vocabulary KL, forward and backward, from two whole matrices of logits and from hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.heads import KL_TARGET
from benchmarks.measure import isolated, middle, pooled, rounds, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict

CASES = ("naive kl", "linear_kl", "linear_logprobs")
WIDTH = {True: 64, False: 896}
VOCAB = {True: 16_000, False: 151_936}
ROWS = {True: (128, 512), False: (512, 1024, 4096)}
VOCABS = {True: (4000, 16_000), False: (8192, 32_768, 151_936)}
FIXED_ROWS = {True: 256, False: 1024}
LIMIT_GIB = 6.0
ONCE = 2**29
"""Logits above which a size gets one process per case: a pass takes the better part of a minute."""
MATRICES = 6
"""So many [N, V] float32 matrices the naive KL is taken to hold, to decide whether it is run."""


def naive_gib(rows: int, vocab: int) -> float:
    """What the naive KL is expected to hold."""
    return MATRICES * rows * vocab * 4 / 2**30


def run(quick: bool) -> dict[str, Any]:
    """Measure against the rows and against the vocabulary, a size that both share once; naive only where it fits."""
    width = WIDTH[quick]
    sizes = [("N", (rows, width, VOCAB[quick])) for rows in ROWS[quick]]
    sizes += [("V", (FIXED_ROWS[quick], width, vocab)) for vocab in VOCABS[quick]]
    points, left_out = [], []
    seen: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for over, size in sizes:
        cases = [c for c in CASES if c != "naive kl" or naive_gib(size[0], size[2]) <= LIMIT_GIB]
        if len(cases) < len(CASES):
            left_out.append({"over": over, "size": size})
        if size not in seen:
            rounds_ = 1 if quick or size[0] * size[2] > ONCE else 2
            seen[size] = measured_points("exact", over, size, cases, rounds_=rounds_)
        points += [point | {"over": over, "x": size[0 if over == "N" else 2]} for point in seen[size]]
    return {"points": points, "left_out": left_out, "limit_gib": LIMIT_GIB}


def measured_points(
    theme: str, over: str, size: tuple[int, int, int], cases: Sequence[str], *, rounds_: int = 1, repeats: int = 2
) -> list[dict[str, Any]]:
    """The head cases at one size, as points of a diagram over N or V."""
    arguments = {"dtype": "float32", "size": size, "repeats": repeats}
    runs = {case: partial(isolated, "benchmarks.head_cases:one", {"case": case} | arguments) for case in cases}
    place = {"theme": theme, "over": over, "x": size[0] if over == "N" else size[2], "size": size}
    return [place | {"case": case} | pooled(seen) for case, seen in rounds(runs, rounds_).items()]


def text(results: Mapping[str, Any]) -> str:
    """The points as tables, what was left out, and the target."""
    parts = []
    for over, name in (("N", "rows"), ("V", "entries of the vocabulary")):
        points = [p for p in results["points"] if p["over"] == over]
        fixed = "V = {2:,}" if over == "N" else "N = {0}"
        size = points[0]["size"]
        logprobs = {p["x"]: middle(p["seconds"]) for p in points if p["case"] == "linear_logprobs"}
        rows = []
        for p in points:
            case = f"`{p['case']}`" if p["case"].startswith("linear") else p["case"]
            cpu, memory = f"{middle(p['cpu_seconds']):.2f}", f"{p['extra_mib']:,.0f}"
            ratio = f"{middle(p['seconds']) / logprobs[p['x']]:.2f}×"
            rows.append((f"{p['x']:,}", case, spread(p["seconds"]), ratio, cpu, memory))
        parts.append(f"Against {over}, the number of {name}; H = {size[1]}, {fixed.format(*size)}, float32:")
        headings = ("seconds, median (range)", "over `linear_logprobs`", "CPU seconds", "extra peak MiB")
        parts.append(table((over, "", *headings), rows))
    parts += [_left_out(results)] if results["left_out"] else []
    if all(tuple(p["size"][1:]) == (WIDTH[False], VOCAB[False]) for p in results["points"] if p["over"] == "N"):
        parts.append("\n".join(verdicts(results)))
    return "\n\n".join(parts)


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """The target at each number of rows, with the whole vocabulary."""
    seconds = {(p["case"], p["x"]): middle(p["seconds"]) for p in results["points"] if p["over"] == "N"}
    rows = sorted({x for _, x in seconds})
    return [
        verdict(
            f"`linear_kl` over `linear_logprobs`, N = {n:,}",
            seconds["linear_kl", n] / seconds["linear_logprobs", n],
            KL_TARGET,
        )
        for n in rows
    ]


def _left_out(results: Mapping[str, Any]) -> str:
    """The sizes at which the naive KL was not run, with its memory there by extrapolation."""
    naive = [p for p in results["points"] if p["case"] == "naive kl"]
    largest = max(naive, key=lambda p: p["size"][0] * p["size"][2])
    per_logit = largest["extra_mib"] / (largest["size"][0] * largest["size"][2])
    sizes = dict.fromkeys(tuple(each["size"]) for each in results["left_out"])
    expected = [f"N = {n}, V = {v:,} ({per_logit * n * v / 1024:.1f} GiB)" for n, _, v in sizes]
    return (
        f"The naive KL was not run where it was expected to hold more than {results['limit_gib']:g} GiB: "
        f"{'; '.join(expected)}. In brackets is what it would hold, extrapolated from its largest run."
    )


def lines_of(points: Sequence[Mapping[str, Any]], value: str) -> dict[str, list[tuple[float, float]]]:
    """Case -> (x, median time or memory), in the order in which the cases come."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        y = point[value] if value == "extra_mib" else middle(point[value])
        found.setdefault(point["case"], []).append((point["x"], max(y, 1e-3)))
    return {case: sorted(line) for case, line in found.items()}


def panels_of(points: Sequence[Mapping[str, Any]], over: str, title: str) -> list[Panel]:
    """Time and memory of some points."""
    labels = {"seconds": "seconds", "extra_mib": "extra peak MiB"}
    return [
        Panel(title=title, over=over, label=label, lines=lines_of(points, value)) for value, label in labels.items()
    ]


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Time and memory against N and V."""
    panels: list[Panel] = []
    for over in ("N", "V"):
        points = [p for p in results["points"] if p["over"] == over]
        panels += panels_of(points, over, f"exact KL against {over}")
    draw(panels, file)


BENCHMARK = Benchmark(
    name="exact",
    title="The exact KL: all logits against `linear_kl`",
    about="KL(policy‖ref) over the whole vocabulary at each row, forward and backward with the gradients of the "
    "policy's hidden states and weight. Naive: two whole matrices of log-probabilities. Extra peak memory is what the "
    "process held at most above its inputs, gradients included. Beside it `linear_logprobs` of the same rows: what "
    "training pays anyway.",
    run=run,
    text=text,
    plot=plot,
)
