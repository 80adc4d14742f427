"""Numbers, tables and paragraphs as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TextIO

MISSING = "-"
GAP = 2
"""Spaces between the columns of a table."""
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
