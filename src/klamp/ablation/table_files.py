"""The table of an ablation for other programs: CSV with every number whole."""

from __future__ import annotations

import csv
import io

from klamp.ablation.table import Table

CSV = "table.csv"
"""The file that is written into the folder of the ablation."""


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
