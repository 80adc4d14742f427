"""The table of an ablation for other programs and for papers: CSV with every number whole, LaTeX with rounded ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from klamp.ablation.columns import GROUPS
from klamp.ablation.table import Table, comparison_lines, comparison_title, lines, notes
from klamp.report.latex import escaped

CSV, LATEX = "table.csv", "table.tex"
"""The files that are written into the folder of the ablation."""


def csv_text(table: Table) -> str:
    """The table as CSV: a row per arm, number and seed, nothing rounded.

    Args:
        table: the table.
    """
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(("arm", "number", "title", "unit", "seed", "value"))
    for row in table.rows:
        for column in table.columns:
            cell = row.cells.get(column.name)
            for seed, value in zip(cell.seeds, cell.values, strict=True) if cell else ():
                rows.writerow((row.arm, column.name, column.title, column.unit, seed, repr(value)))
    return written.getvalue()


def latex_text(table: Table) -> str:
    """The tables as LaTeX for the package booktabs, with the notes below them as a comment.

    Args:
        table: the table.
    """
    found = [(title, *lines(table, group)) for group, title in GROUPS.items()]
    found.append((comparison_title(table), *comparison_lines(table)))
    parts = [_tabular(title, heading, rows) for title, heading, rows in found if heading]
    return "\n\n".join([*parts, "\n".join(f"% {' '.join(note.split())}" for note in notes(table))]) + "\n"


def _tabular(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "\n".join(_row(cells) for cells in rows)
    texts = "l" + "r" * (len(heading) - 1)
    top = f"% {title}\n\\begin{{tabular}}{{{texts}}}\n\\toprule\n{_row(heading)}\n\\midrule"
    return f"{top}\n{body}\n\\bottomrule\n\\end{{tabular}}"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(escaped(" ".join(cell.split())) for cell in cells) + r" \\"
