"""The table as CSV: every number whole."""

from __future__ import annotations

import csv
import io

from tests.ablation.outcomes import failed, sweep

from klamp.ablation.table import summarise
from klamp.ablation.table_files import csv_text

BETAS = [{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.1}]


def test_csv_has_every_number_of_every_seed() -> None:
    runs = [*sweep(BETAS), failed('a, "b"')]
    rows = list(csv.DictReader(io.StringIO(csv_text(summarise(runs)))))
    found = {(row["arm"], row["name"] if "name" in row else row["number"], int(row["seed"])): row for row in rows}
    for run in runs:
        for name, value in run.numbers.items():
            assert float(found[run.arm, name, run.seed]["value"]) == value, "not rounded"
    assert found["beta=0.01", "kl/reverse", 2]["unit"] == "nats/token"
    assert not [key for key in found if key[0].startswith("a, ")], "a failed run has no numbers"
    assert csv_text(summarise([])).count("\n") == 1
