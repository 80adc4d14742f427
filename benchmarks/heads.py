"""Output heads, forward and backward: the matrix products alone, naive logits, TRL, Liger, klamp."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.head_cases import FLOORS, FROZEN_CASES, KL_CASES, LOGPROB_CASES
from benchmarks.measure import isolated, middle, pooled, rounds, spread
from benchmarks.plots import Panel, draw
from benchmarks.records import Benchmark, table, verdict

CASES = (FLOORS[0], *LOGPROB_CASES, *KL_CASES, FLOORS[1], *FROZEN_CASES)
DTYPES = ("float32", "bfloat16")
SIZES = {True: (256, 128, 32_000), False: (1024, 896, 151_936)}
ROUNDS, REPEATS = 2, 2
KL_ROWS = 2
"""The naive KL holds six matrices of logits; it is measured on this part of the rows."""
TARGETS = {"float32": 1.25, "bfloat16": 2.0}
KL_TARGET = 1.6


def run(quick: bool) -> dict[str, Any]:
    """Measure every case in both types; the quick run does so once, in float32."""
    size, dtypes = SIZES[quick], DTYPES[: 1 if quick else 2]
    found: dict[str, Any] = {}
    for dtype in dtypes:
        runs = {case: partial(one, case, dtype, size, 2 if quick else REPEATS) for case in CASES}
        measured = rounds(runs, 1 if quick else ROUNDS)
        found[dtype] = {case: pooled(results) for case, results in measured.items()}
    return {"size": dict(zip(("rows", "width", "vocab"), size, strict=True)), "heads": found}


def one(case: str, dtype: str, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """A case in a process of its own, on the part of the rows that fits."""
    rows = size[0] // KL_ROWS if case == "naive kl" else size[0]
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
    """The table, and the targets."""
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
    where = f"N = {size['rows']}, H = {size['width']}, V = {size['vocab']:,}"
    aims = verdicts(results) if tuple(size.values()) == SIZES[False] else ["The targets are for the full size."]
    return "\n\n".join([f"{where}:", table(headings, rows), "\n".join(aims)])


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """Each target with what was measured."""
    lines = []
    for dtype, cases in results["heads"].items():
        own = cases["linear_logprobs"]
        lines.append(
            verdict(
                f"{dtype}: `linear_logprobs` over the products alone",
                per_row(own) / per_row(cases["products"]),
                TARGETS[dtype],
            )
        )
        rivals = {name: cases[name] for name in cases if name.startswith(("TRL", "Liger")) and "frozen" not in name}
        for what, of in (("seconds", per_row), ("peak memory", lambda seen: seen["extra_mib"])):
            best = min(rivals, key=lambda name: of(rivals[name]))
            share = of(own) / of(rivals[best])
            lines.append(verdict(f"{dtype}: its {what} over those of the best of TRL and Liger ({best})", share, 1.0))
        for name in ("", ", frozen head"):
            kl, own = (cases.get(f"{head}{name}") for head in ("linear_kl", "linear_logprobs"))
            if kl and own:  # older records have no KL of a frozen head
                what = f"{dtype}: `linear_kl` over `linear_logprobs`{name}"
                lines.append(verdict(what, per_row(kl) / per_row(own), KL_TARGET))
    return [*lines, _products(results["size"])]


def _products(size: Mapping[str, int]) -> str:
    """How many products the two heads form, so that a reader knows how close to a target they can come."""
    n, h = size["rows"], size["width"]
    logprobs, kl = 3 + max(0, n - h) / n, 4 + 2 * max(0, n - h / 2) / n
    return (
        f"- The products alone: `linear_kl` forms {kl:.2f} of a row's, `linear_logprobs` {logprobs:.2f}, which is "
        f"{kl / logprobs:.2f} times as many; where the head is frozen 5 and 2, 2.50 times "
        "([why](../decisions/0011-what-a-step-does-once.md))."
    )


def plot(results: Mapping[str, Any], file: Path) -> None:
    """Bars of time and memory."""
    panels = []
    for dtype, cases in results["heads"].items():
        whole = {case: seen for case, seen in cases.items() if case != "naive kl"}
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
