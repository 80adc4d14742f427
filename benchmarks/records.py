"""A measurement as a record: JSON with every number, Markdown with tables, a picture; `theme_hardware_yyyymm.*`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One `python -m benchmarks NAME`."""

    name: str
    """NAME, and the theme of its records."""
    title: str
    """Heading of the record."""
    about: str
    """What is measured and how, in a few sentences."""
    run: Callable[[bool], dict[str, Any]]
    """Measures; True: the quick sizes. Its dictionary is the record's `results`."""
    text: Callable[[Mapping[str, Any]], str]
    """Results -> Markdown."""
    plot: Callable[[Mapping[str, Any], Path], None] | None = None
    """Results, file -> a picture there."""


def measure(benchmark: Benchmark, *, quick: bool) -> dict[str, Any]:
    """Run a benchmark and put its results into a record."""
    before = os.getloadavg()[0]
    results = benchmark.run(quick)
    return {
        "benchmark": benchmark.name,
        "command": f"python -m benchmarks {benchmark.name}" + (" --quick" if quick else ""),
        "date": date.today().isoformat(),
        "machine": machine(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "2")),
        "load_before": before,
        "results": results,
    }


def hardware(record: Mapping[str, Any]) -> str:
    """Short name of what a record was taken on: cpu2, nvidia_h200."""
    device = record["machine"]["device"]
    return f"cpu{record['machine']['cores']}" if device == "cpu" else re.sub(r"\W+", "_", device.lower())


def stem(record: Mapping[str, Any]) -> str:
    """Name of a record's files."""
    quick = "_quick" if "--quick" in record["command"] else ""
    return f"{record['benchmark']}{quick}_{hardware(record)}_{record['date'][:7].replace('-', '')}"


def save(record: Mapping[str, Any], benchmark: Benchmark, folder: Path = RESULTS) -> list[Path]:
    """Write JSON, Markdown and picture."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{stem(record)}.json", folder / f"{stem(record)}.md"]
    files[0].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    files[1].write_text(markdown(record, benchmark), encoding="utf-8")
    if benchmark.plot is not None:
        files.append(folder / f"{stem(record)}.png")
        benchmark.plot(record["results"], files[2])
    return files


def markdown(record: Mapping[str, Any], benchmark: Benchmark) -> str:
    """The page of a record."""
    place, month = hardware(record), date.fromisoformat(record["date"]).strftime("%B %Y")
    found = record["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    processor = f"{found['processor']}, {found['cores']} cores" if found["device"] == "cpu" else found["device"]
    parts = [
        f"# {benchmark.title} ({place}, {month})",
        f"Command: `{record['command']} --record`, {record['threads']} threads, on {processor}; "
        f"Python {found['python']}, {versions}. Load average before the start {record['load_before']:.1f}, at most "
        f"{highest_load(record['results']):.1f} during the runs (the runs themselves count in it).",
        benchmark.about,
        benchmark.text(record["results"]),
    ]
    if benchmark.plot is not None:
        parts.append(f"![{benchmark.title}]({stem(record)}.png)")
    return "\n\n".join(parts) + "\n"


def highest_load(results: Any) -> float:
    """The highest load average anywhere in the results."""
    if isinstance(results, Mapping):
        here = [float(results["load"])] if "load" in results else []
        return max([*here, *(highest_load(value) for value in results.values())], default=0.0)
    if isinstance(results, list):
        return max(map(highest_load, results), default=0.0)
    return 0.0


def newest(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The newest record of a benchmark, quick ones left out; None where there is none."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"{name}_*.json"))]
    whole = [record for record in found if record.get("benchmark") == name and "--quick" not in record["command"]]
    return max(whole, key=lambda record: record["date"], default=None)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def verdict(what: str, value: float, bound: float, *, at_least: bool = False) -> str:
    """A line on a target: what was measured, what was aimed at, and whether it is met."""
    met = value >= bound if at_least else value <= bound
    side = "at least" if at_least else "at most"
    return f"- {what}: {value:.2f} (target {side} {bound:.2f}: {'met' if met else '**missed**'})"
