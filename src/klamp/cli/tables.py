"""Tables and paragraphs: in colour where there is a terminal, as aligned text elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TextIO

GAP = "  "
WIDTH = 100


def show_table(
    stream: TextIO,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table.

    Args:
        stream: where to.
        title: stands above it.
        headings: of the columns; all empty: no head.
        rows: cells as text.
        styles: whole text of a cell -> rich style, on a terminal.
    """
    if stream.isatty() and find_spec("rich"):
        _print_rich(stream, title, headings, rows, styles or {})
        return
    head = [headings] if any(headings) else []
    print(title, file=stream)
    print("\n".join(_lines([*head, *rows])), file=stream, flush=True)


def show_paragraph(stream: TextIO, text: str, *, label: str = "", width: int = 12) -> None:
    """Print a text, wrapped and indented; a label stands before it in a column of its own."""
    start = f"  {label:<{width}} " if label or width else "  "
    filled = textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )
    print(filled, file=stream, flush=True)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + GAP.join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in rows
    ]


def _print_rich(
    stream: TextIO, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=any(headings), show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")  # a unit that is cut off says nothing
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    console = Console(file=stream, highlight=False)
    console.print(Text(title, style="bold"))
    console.print(table)
