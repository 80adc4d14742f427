"""Numbers, tables and paragraphs as text, and the columns of a run's table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # the commands that know no configuration start without it
    from klamp.training.config import TrainConfig

MISSING = "-"
WIDTH = 100
"""Most columns of a paragraph."""


def fixed(digits: int) -> Callable[[float], str]:
    """A number with so many digits after the point; very small and very large ones in powers of ten."""

    def write(value: float) -> str:
        size = abs(value)
        if not math.isfinite(value):
            return str(value)
        if size == 0:
            return f"{0:.{digits}f}"
        return f"{value:.{digits}f}" if 0.5 * 10**-digits <= size < 1000 else f"{value:.0e}"

    return write


def short(value: float) -> str:
    """A number as text, with three significant digits."""
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.1e}"


def percent(value: float) -> str:
    """A share in [0, 1] as text, in percent."""
    return f"{100 * value:.1f}%"


def thousands(value: float) -> str:
    """A count as text, in thousands where it is long."""
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


def duration(seconds: float) -> str:
    """Seconds as text on a clock: 1:02 or 3:04:05."""
    minutes, left = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def show_table(stream: TextIO, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table.

    Args:
        stream: where to.
        title: stands above it.
        headings: of the columns; all empty: no head.
        rows: cells as text.
    """
    print("\n".join([title, *(f"  {line}" for line in aligned(headings, rows))]), file=stream, flush=True)


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; headings that are all empty are no line."""
    lines = [headings, *rows] if any(headings) else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        (" " * GAP).join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]


def show_paragraph(stream: TextIO, text: str, *, label: str = "", width: int = 12) -> None:
    """Print a text, wrapped and indented; a label stands before it in a column of its own."""
    start = f"  {label:<{width}} " if label or width else "  "
    filled = textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )
    print(filled, file=stream, flush=True)


GAP, STEP_WIDTH = 2, 7
"""Spaces between columns; the width of the first."""


@dataclass(frozen=True, kw_only=True)
class StepColumn:
    """One column of the table."""

    title: str
    """The column's heading."""
    metric: str
    """The metric that the column shows; see `klamp.diagnostics.metrics`."""
    width: int
    """The column's width in characters."""
    write: Callable[[float], str]
    """The function that writes a value as text."""
    rank: int
    """Order of removal on a narrow terminal: columns with the largest rank go first."""

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The metric's value as text; "-" where there is none."""
        return self.write(metrics[self.metric]) if self.metric in metrics else MISSING


COLUMNS = (
    StepColumn(title="reward", metric="reward", width=6, write=fixed(3), rank=0),
    StepColumn(title="KL k1", metric="kl/k1", width=7, write=fixed(4), rank=4),
    StepColumn(title="KL k3", metric="kl/k3", width=6, write=fixed(4), rank=1),
    StepColumn(title="exact", metric="kl/exact", width=6, write=fixed(4), rank=2),
    StepColumn(title="over", metric="kl/over_budget", width=6, write=percent, rank=3),
    StepColumn(title="beta", metric="beta", width=7, write=short, rank=1),
    StepColumn(title="length", metric="length/mean", width=6, write=fixed(1), rank=5),
    StepColumn(title="entropy", metric="policy/entropy", width=7, write=fixed(3), rank=7),
    StepColumn(title="clip", metric="policy/ratio_clipped", width=6, write=percent, rank=6),
    StepColumn(title="lr", metric="train/learning_rate", width=7, write=short, rank=8),
    StepColumn(title="tok/s", metric="speed/tokens_per_second", width=6, write=thousands, rank=9),
)
LEGEND = "KL in nats per token; clip: tokens past a ratio bound; tok/s: sampled and trained"
LEGEND_OVER = "; over: completions past the KL budget"


def columns_for(config: TrainConfig, width: int) -> list[StepColumn]:
    """The columns that a run of this configuration has, and that fit into a line."""
    empty = {"kl/over_budget"} if config.kl.kl_clip_method == "none" else set()
    if config.run.backend == "tinker":
        empty |= {"kl/exact", "policy/entropy"}  # a service keeps the logits
    if config.run.backend == "verl":
        empty |= {"kl/exact", "kl/k1", "kl/k3"} - {f"kl/{config.kl.kl_estimator}"}  # it logs one KL, that of its term
    kept = [column for column in COLUMNS if column.metric not in empty]
    while len(kept) > 1 and STEP_WIDTH + sum(column.width + GAP for column in kept) > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept


def legend_for(config: TrainConfig) -> str:
    """The legend of the table: what columns mean whose titles do not say it."""
    return LEGEND + (LEGEND_OVER if config.kl.kl_clip_method != "none" else "")
