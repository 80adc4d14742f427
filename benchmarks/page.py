"""What the README shows of the records: `python -m benchmarks page` writes its table.

Nothing is measured; the newest records under results/ are read. A test holds the README against what this writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import overhead, step
from benchmarks.measure import middle
from benchmarks.records import RESULTS, newest, table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks: written by `python -m benchmarks page` -->", "<!-- end of benchmarks -->"


def readme_part(folder: Path = RESULTS) -> str:
    """The README's table of whole steps; empty where there is no record of them."""
    whole, cost = newest("floor", folder), newest("overhead", folder)
    if whole is None:
        return ""
    points = [point for point in whole["results"]["points"] if point["over"] in {"prompt", "model"}]
    return _steps(points, cost["results"] if cost else None)


def _steps(points: Sequence[Mapping[str, Any]], cost: Mapping[str, Any] | None) -> str:
    """One line per model and length of prompts; of `points`, those of one size are one."""
    kl: dict[tuple[Any, ...], str] = {}
    for row in overhead.costs(cost) if cost else []:
        seen = row["seen"]
        kl[seen["model"], seen["prompt"], seen["trainer"]] = f"{middle(row['seconds']):.2f} s"
    rows = []
    for pair in step.pairs(points):
        where = (pair["klamp"]["model"], pair["klamp"]["prompt"])
        rows.append(
            (
                f"{where[0]} parameters, prompts of {where[1]}",
                *(_rate(pair, name) for name in step.NAMES),
                *(kl.get((*where, trainer), "") for trainer in ("trl", "klamp")),
            )
        )
    headings = ("GRPO step with KL, tokens/s", *step.NAMES.values(), "KL alone, TRL", "KL alone, klamp train")
    return table(headings, rows)


def _rate(pair: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Tokens per second, and how often TRL's that is."""
    rate, stock = step.throughput(pair[name]), step.throughput(pair["trl"])
    return f"{rate:,.0f}" if name == "trl" else f"{rate:,.0f} ({rate / stock:.1f}×)"


def write() -> list[Path]:
    """Write the README's part."""
    README.write_text(with_part(README.read_text(encoding="utf-8"), readme_part()), encoding="utf-8")
    return [README]


def with_part(readme: str, part: str) -> str:
    """The README with what stands between the two marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"
