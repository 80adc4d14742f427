"""`python -m tests.reliability [--kills N] [--seed N] [--record] [--page]`; see docs/records/reliability.md.

Exits with 1 if any run that was killed did not end equal to the undisturbed one.
"""

from __future__ import annotations

import argparse  # noqa: TID251  (a program of its own)
import json
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from tests.reliability import record
from tests.reliability.kills import Ground, plan

from benchmarks.measure import machine


def main() -> int:
    """Kill as many runs as were asked for; say how each one ended."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability", description="Kill runs and take them up again."
    )
    parser.add_argument("--kills", type=int, default=100, help="how many runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="which runs, and when")
    parser.add_argument("--record", action="store_true", help="keep the record, and show it in docs/records")
    parser.add_argument("--page", action="store_true", help="kill nothing: write that page's part from the record")
    given = parser.parse_args()
    if given.page:
        record.show(json.loads(record.RECORD.read_text(encoding="utf-8")))
        return 0
    found = _killed(given.kills, given.seed)
    print(record.table(found["kills"]))
    if given.record:
        print(*(f"wrote {file}" for file in record.write(found)), sep="\n")
    return int(any(each["differs"] for each in found["kills"]))


def _killed(count: int, seed: int) -> dict[str, Any]:
    """The record of a series of kills."""
    started, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        for number, kill in enumerate(plan(count, seed), 1):
            outcome = ground.strike(kill)
            rows.append(record.row(kill, outcome))
            print(f"{number}/{count} {kill}: {', '.join(outcome.differs) or 'equal'}", flush=True)
    return {
        "command": f"python -m tests.reliability --kills {count} --seed {seed}",
        "date": date.today().isoformat(),
        "machine": machine(),
        "seconds": time.monotonic() - started,
        "kills": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())
