"""The record of a series of kills, and the page that shows it; nothing is measured here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.reliability import fuzzers
from tests.reliability.kills import AT_RANDOM, Kill, Outcome
from tests.reliability.points import POINTS
from tests.reliability.runs import CASES

RECORD = Path(__file__).resolve().parent / "record.json"
PAGE = RECORD.parents[2] / "docs" / "records" / "reliability.md"


def row(kill: Kill, outcome: Outcome) -> dict[str, Any]:
    """A kill and what became of it, as it stands in the record."""
    return asdict(kill) | asdict(outcome)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the points of the first blows and the cases: how many of the killed runs ended equal."""
    kills, equal = Counter(map(_cell, rows)), Counter(_cell(each) for each in rows if not each["differs"])
    lines = [("killed", *CASES, "all"), ("---",) * (len(CASES) + 2)]
    for point in (AT_RANDOM, *POINTS, None):
        found = [_share(equal, kills, point, case) for case in (*CASES, None)]
        if found[-1]:
            lines.append((point or "all", *found))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["blows"][0]["point"], row["case"]


def _share(equal: Mapping[Any, int], kills: Mapping[Any, int], point: str | None, case: str | None) -> str:
    """So many of so many, of one point or all, and one case or all; empty where there are none."""
    cells = [cell for cell in kills if point in (cell[0], None) and case in (cell[1], None)]
    count = sum(kills[cell] for cell in cells)
    return f"{sum(equal[cell] for cell in cells)} of {count}" if count else ""


def text(record: Mapping[str, Any]) -> str:
    """What the page says of a record."""
    rows, machine = record["kills"], record["machine"]
    again, differing = sum(len(each["blows"]) > 1 for each in rows), sum(bool(each["differs"]) for each in rows)
    blows, hits = sum(len(each["blows"]) for each in rows), sum(each["hits"] for each in rows)
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return "\n\n".join(
        (
            f"`{record['command']}`, {record['date']}: {len(rows)} runs were killed, {again} of them a second time "
            f"after they were taken up. Of {blows} times that SIGKILL was sent, {hits} met a run that was alive; the "
            f"others came after its end. **{len(rows) - differing} of {len(rows)}** ended equal to the undisturbed "
            f"run, {differing} did not.",
            "How many ended equal, by where they were killed first:",
            table(rows),
            f"{record['seconds'] / 60:.0f} minutes on a machine that had other work to do, one thread per run; "
            f"{versions}. The record is `tests/reliability/record.json`.",
        )
    )


def with_part(page: str, name: str, part: str) -> str:
    """A page with what stands between the two marks of a name replaced."""
    head, begin, rest = page.partition(f"<!-- {name}: ")
    made_by, _, rest = rest.partition("\n")
    _, end, tail = rest.partition(f"<!-- end of {name} -->")
    return f"{head}{begin}{made_by}\n\n{part}\n\n{end}{tail}"


def write(record: Mapping[str, Any]) -> list[Path]:
    """Keep a record, and show it on the page."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(record)
    return [RECORD, PAGE]


def show(record: Mapping[str, Any]) -> None:
    """Write the page's parts anew."""
    PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")


def page_of(page: str, record: Mapping[str, Any]) -> str:
    """The page with its parts on the kills and on what is drawn written anew."""
    return with_part(with_part(page, "kills", text(record)), "fuzz", fuzzers.text())
