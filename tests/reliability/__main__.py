"""`python -m tests.reliability [--kills N] [--seed N]` prints the table of docs/records/reliability.md.

Exits with 1 if any run that was killed did not end equal to the undisturbed one.
"""

from __future__ import annotations

import argparse  # noqa: TID251  (a program of its own)
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.reliability.kills import AT_RANDOM, Ground, Kill, Outcome, plan
from tests.reliability.points import POINTS
from tests.reliability.runs import CASES


def main() -> int:
    """Kill as many runs as were asked for; say how each one ended."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability", description="Kill runs and take them up again."
    )
    parser.add_argument("--kills", type=int, default=100, help="how many runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="which runs, and when")
    given = parser.parse_args()
    ended: list[tuple[Kill, Outcome]] = []
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        for number, kill in enumerate(plan(given.kills, given.seed), 1):
            ended.append((kill, ground.strike(kill)))
            print(f"{number}/{given.kills} {kill}: {', '.join(ended[-1][1].differs) or 'equal'}", flush=True)
    print(table(ended))
    sent, hits = sum(len(kill.blows) for kill, _ in ended), sum(outcome.hits for _, outcome in ended)
    print(f"Of {sent} times that SIGKILL was sent, {hits} met a run that was alive.")
    return int(any(outcome.differs for _, outcome in ended))


def table(ended: Sequence[tuple[Kill, Outcome]]) -> str:
    """How many ended equal, as Markdown: a row for each point of a first blow, a column for each case."""
    kills = Counter((kill.blows[0].point, kill.case) for kill, _ in ended)
    equal = Counter((kill.blows[0].point, kill.case) for kill, outcome in ended if not outcome.differs)
    lines = [("killed", *CASES, "all"), ("---",) * (len(CASES) + 2)]
    for point in (AT_RANDOM, *POINTS, None):
        cells: list[str] = []
        for case in (*CASES, None):
            found = [cell for cell in kills if point in (cell[0], None) and case in (cell[1], None)]
            count = sum(kills[cell] for cell in found)
            cells.append(f"{sum(equal[cell] for cell in found)} of {count}" if count else "")
        if cells[-1]:
            lines.append((point or "all", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
