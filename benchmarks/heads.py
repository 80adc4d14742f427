"""Output heads, forward and backward: the matrix products alone, naive logits, TRL, Liger, cut-cross-entropy, klamp.

At two sizes: all cases with a vocabulary of 151,936, and those that matter with one of 248,320, today's largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.head_cases import (
    FLOORS,
    FROZEN_CASES,
    KL_CASES,
    KL_RIVALS,
    LOGPROB_CASES,
    RIVALS,
    TOP_K_CASES,
    unavailable,
)
from benchmarks.measure import isolated, middle, pooled, rounds, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict

CASES = (FLOORS[0], *LOGPROB_CASES, *KL_CASES, *TOP_K_CASES, FLOORS[1], *FROZEN_CASES)
LARGE_CASES = (FLOORS[0], *RIVALS, "linear_logprobs", *KL_RIVALS, "linear_kl", TOP_K_CASES[1])
DTYPES = ("float32", "bfloat16")
SIZES = {True: (256, 128, 32_000), False: (1024, 896, 151_936)}
LARGE = (256, 2048, 248_320)
"""Rows, width and vocabulary as in the open models of 2026; few rows, for a CPU."""
ROUNDS, REPEATS = 2, 2
KL_ROWS = 2
"""The naive KL holds six matrices of logits; it is measured on this part of the rows."""
TARGETS = {"float32": 1.25, "bfloat16": 2.0}
KL_TARGET = 1.6


def run(quick: bool) -> dict[str, Any]:
    """Measure every case in both types, then those of the large vocabulary; the quick run: every case in float32."""
    if quick:
        return measured(SIZES[quick], CASES, DTYPES[:1], count=1)
    large = measured(LARGE, LARGE_CASES, DTYPES, count=1)
    return measured(SIZES[quick], CASES, DTYPES, count=ROUNDS) | {"large": large}


def measured(size: tuple[int, int, int], cases: Sequence[str], dtypes: Sequence[str], *, count: int) -> dict[str, Any]:
    """The cases that can run here, in turn, `count` times; and of the others why they cannot."""
    skipped = {case: why for case in cases if (why := unavailable(case))}
    heads: dict[str, Any] = {}
    for dtype in dtypes:
        runs = {case: partial(one, case, dtype, size, REPEATS) for case in cases if case not in skipped}
        heads[dtype] = {case: pooled(results) for case, results in rounds(runs, count).items()}
    return {"size": dict(zip(("rows", "width", "vocab"), size, strict=True)), "heads": heads, "skipped": skipped}


def one(case: str, dtype: str, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """A case in a process of its own, on the part of the rows that fits."""
    rows = size[0] // KL_ROWS if case.startswith("naive kl") else size[0]
    arguments = {"case": case, "dtype": dtype, "size": (rows, *size[1:]), "repeats": repeats}
    return isolated("benchmarks.head_cases:one", arguments)


def named(case: str) -> str:
    """A case as a table names it: functions of klamp in code type."""
    function, comma, rest = case.partition(",")
    return f"`{function}`{comma}{rest}" if function.startswith("linear") else case


def per_row(seen: Mapping[str, Any], clock: str = "seconds") -> float:
    """Median time per row."""
    return middle(seen[clock]) / seen["rows"]


def text(results: Mapping[str, Any]) -> str:
    """The table and the targets of each size, and what did not run."""
    whole = tuple(results["size"].values()) == SIZES[False]
    aims = [*verdicts(results), _products(results["size"])] if whole else ["The targets are for the full size."]
    parts = [_table(results), "\n".join(aims)]
    if "large" in results:
        large = results["large"]
        lines = [line for dtype, cases in large["heads"].items() for line in _against_rivals(dtype, cases)]
        parts += ["## The vocabulary of today's open models", _table(large), "\n".join(lines)]
    skipped = results.get("skipped", {}) | results.get("large", {}).get("skipped", {})
    if skipped:
        parts.append("\n".join(f"- Not measured: {named(case)}. Cause: {why}." for case, why in skipped.items()))
    return "\n\n".join(parts)


def _table(results: Mapping[str, Any]) -> str:
    """The cases of one size."""
    rows = []
    for dtype, cases in results["heads"].items():
        for case, seen in cases.items():
            floor = cases[FLOORS["frozen" in case]]
            rows.append(
                (
                    dtype,
                    named(case),
                    seen["rows"],
                    spread(seen["seconds"]),
                    f"{middle(seen['cpu_seconds']):.2f}",
                    f"{per_row(seen) / per_row(floor):.2f}×",
                    f"{seen['extra_mib']:.0f}",
                )
            )
    size = results["size"]
    headings = ("type", "head", "rows", "seconds, median (range)", "CPU seconds", "over products", "extra peak MiB")
    return f"N = {size['rows']}, H = {size['width']}, V = {size['vocab']:,}:\n\n{table(headings, rows)}"


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """Each target with what was measured."""
    lines = []
    for dtype, cases in results["heads"].items():
        ratio = per_row(cases["linear_logprobs"]) / per_row(cases["products"])
        lines.append(verdict(f"{dtype}: `linear_logprobs` over the products alone", ratio, TARGETS[dtype]))
        lines += _against_rivals(dtype, cases)
        for name in ("", ", frozen head"):
            kl, own = (cases.get(f"{head}{name}") for head in ("linear_kl", "linear_logprobs"))
            if kl and own:  # older records have no KL of a frozen head
                what = f"{dtype}: `linear_kl` over `linear_logprobs`{name}"
                lines.append(verdict(what, per_row(kl) / per_row(own), KL_TARGET))
    return lines


def _against_rivals(dtype: str, cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Seconds and memory of klamp's heads over those of the best of the other packages' that were measured."""
    lines = []
    for own, names, its in (("linear_logprobs", RIVALS, "its"), ("linear_kl", KL_RIVALS, "`linear_kl`'s")):
        rivals = {name: cases[name] for name in names if name in cases}
        which = "TRL, Liger and cut-cross-entropy" if "cut-cross-entropy" in rivals else "TRL and Liger"
        for what, of in (("seconds", per_row), ("peak memory", lambda seen: seen["extra_mib"])):
            if rivals:  # older records have no KL of TRL and Liger
                best = min(rivals, key=lambda name: of(rivals[name]))
                share = of(cases[own]) / of(rivals[best])
                lines.append(verdict(f"{dtype}: {its} {what} over those of the best of {which} ({best})", share, 1.0))
    return lines


def _products(size: Mapping[str, int]) -> str:
    """How many products the two heads form, so that a reader knows how close to a target they can come."""
    n, h = size["rows"], size["width"]
    logprobs, kl = 3 + max(0, n - h) / n, 4 + 2 * max(0, n - h / 2) / n
    return (
        f"- The products alone: `linear_kl` forms {kl:.2f} of a row's, `linear_logprobs` {logprobs:.2f}, which is "
        f"{kl / logprobs:.2f} times as many; where the head is frozen 5 and 2, 2.50 times (docs/decisions.md)."
    )


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of time and memory."""
    panels = []
    for dtype, cases in results["heads"].items():
        whole = {case: seen for case, seen in cases.items() if not case.startswith("naive kl")}
        times = {case: middle(seen["seconds"]) for case, seen in whole.items()}
        memory = {case: seen["extra_mib"] for case, seen in whole.items()}
        panels.append(Panel(title=f"{dtype}: forward and backward", label="seconds", bars=times))
        panels.append(Panel(title=f"{dtype}: memory above the inputs", label="extra peak MiB", bars=memory))
    draw(panels, file)


BENCHMARK = Benchmark(
    name="heads",
    title="Output heads: log-probabilities and KL from hidden states",
    about="Forward and backward with the gradients of hidden states and weight (of hidden states alone where the head "
    "is frozen). Extra peak memory is what the process held at most above its inputs, gradients included. Over "
    "products: per row, against the three (frozen: two) matrix products without which there is no gradient. "
    f"The naive KL is measured on 1/{KL_ROWS} of the rows. Row chunks are a user's twenty lines: "
    "`torch.utils.checkpoint` over 128 rows at a time.",
    run=run,
    text=text,
    plot=plot,
)
