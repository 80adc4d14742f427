"""`python -m benchmarks NAME [--quick] [--json] [--record [FOLDER]] [--render RECORD.json]`; docs/records.

`python -m benchmarks page` measures nothing: it writes that page, and the README's tables, from the records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    alarms,
    batches,
    check,
    controllers,
    elsewhere,
    exact,
    gpu,
    heads,
    over_floor,
    overhead,
    page,
    references,
    scale,
    step,
    teachers,
    unsloth,
    waits,
)
from benchmarks.records import RESULTS, Benchmark, markdown, measure, save

MODULES = (
    heads,
    exact,
    teachers,
    step,
    elsewhere,
    over_floor,
    overhead,
    batches,
    scale,
    references,
    waits,
    controllers,
    alarms,
    check,
    unsloth,
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
    parser.add_argument(
        "--seeds", metavar="N", type=int, default=controllers.SEEDS, help="controllers: runs per target"
    )
    parser.add_argument("--targets", metavar="KL", type=float, nargs="+", default=controllers.TARGETS)
    return parser


def main() -> None:
    """Measure what was asked for, and print or write it."""
    given = _parser().parse_args()
    if given.name == "page":
        _say(page.write(list(BENCHMARKS.values())))
        return
    if given.render:
        record: dict[str, Any] = json.loads(Path(given.render).read_text(encoding="utf-8"))
        _say(save(record, BENCHMARKS[record["benchmark"]], Path(given.render).parent))
        return
    controlled = partial(controllers.run, targets=tuple(given.targets), seeds=given.seeds)
    chosen = BENCHMARKS | {controllers.BENCHMARK.name: replace(controllers.BENCHMARK, run=controlled)}
    every = [each for name, each in chosen.items() if name not in (gpu.BENCHMARK.name, unsloth.BENCHMARK.name)]
    for benchmark in every if given.name == "all" else [chosen[given.name]]:
        record = measure(benchmark, quick=given.quick)
        print(json.dumps(record, indent=1) if given.json else markdown(record, benchmark), flush=True)
        if given.record:
            _say(save(record, benchmark, Path(given.record)))
    if given.record and Path(given.record) == RESULTS:
        _say(page.write(list(BENCHMARKS.values())))


def _say(files: Sequence[Path]) -> None:
    for file in files:
        print(f"wrote {file}", file=sys.stderr)


if __name__ == "__main__":
    main()
