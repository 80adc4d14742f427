"""`python -m benchmarks NAME [--quick] [--json] [--record [FOLDER]] [--render RECORD.json]`; docs/records/index.md.

`python -m benchmarks page` measures nothing: it writes the README's table from the records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    alarms,
    check,
    gpu,
    heads,
    over_floor,
    overhead,
    page,
    step,
)
from benchmarks.records import RESULTS, Benchmark, markdown, measure, save

MODULES = (
    heads,
    step,
    over_floor,
    overhead,
    alarms,
    check,
    gpu,
)
BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in MODULES}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measurements, each in a process of its own."
    )
    parser.add_argument("name", choices=[*BENCHMARKS, "all", "page"], help="what to measure")
    parser.add_argument("--quick", action="store_true", help="small sizes; each benchmark ends within a minute")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of Markdown")
    parser.add_argument("--record", metavar="FOLDER", nargs="?", const=str(RESULTS), help="write JSON, Markdown, PNG")
    parser.add_argument("--render", metavar="FILE", help="measure nothing: write Markdown and PNG of this record again")
    return parser


def main() -> None:
    """Measure what was asked for, and print or write it."""
    given = _parser().parse_args()
    if given.name == "page":
        _say(page.write())
        return
    if given.render:
        record: dict[str, Any] = json.loads(Path(given.render).read_text(encoding="utf-8"))
        _say(save(record, BENCHMARKS[record["benchmark"]], Path(given.render).parent))
        return
    every = [each for name, each in BENCHMARKS.items() if name != gpu.BENCHMARK.name]
    for benchmark in every if given.name == "all" else [BENCHMARKS[given.name]]:
        record = measure(benchmark, quick=given.quick)
        print(json.dumps(record, indent=1) if given.json else markdown(record, benchmark), flush=True)
        if given.record:
            _say(save(record, benchmark, Path(given.record)))
    if given.record and Path(given.record) == RESULTS:
        _say(page.write())


def _say(files: Sequence[Path]) -> None:
    for file in files:
        print(f"wrote {file}", file=sys.stderr)


if __name__ == "__main__":
    main()
