"""Reads TRL's tables of completions (log_completions: completions/*.parquet); `klamp.trl` adds each completion's KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from klamp.diagnostics.history import History, Row, RunSettings
from klamp.diagnostics.names import as_number
from klamp.errors import missing_library
from klamp.records.files import each_row, shortened, unreadable
from klamp.tasks.paths import with_end

KL = ("kl/k1", "kl/k3")
OTHERS = ("step", "prompt", "completion", "advantage", "images", "length")
"""Columns that are no reward function's."""
WITHOUT_KL = (
    "the tables have no KL: klamp.trl's trainer writes each completion's with log_completions=True; TRL's own logs it "
    "to trainer_state.json"
)


def read_tables(files: Sequence[Path]) -> History:
    """Read the history in TRL's tables of completions.

    Raises:
        DataError: one is damaged, or no table of completions.
        MissingLibrary: pyarrow is not installed.
    """
    rows = [row for file in files for row in each_row(_rows_of(file), file, _checked, what="row {} is no completion")]
    history = History(source="TRL table of completions", settings=RunSettings(other_kernels=True))
    for step, group in groupby(sorted(rows, key=lambda row: row["step"]), key=lambda row: row["step"]):
        written = list(group)
        prompts = len({str(row["prompt"]) for row in written})
        history.rows.append(Row(step=step, metrics=_metrics_of(written), prompts=prompts))
    history.cautions += [] if history.measures_kl else [WITHOUT_KL]
    return history


def _rows_of(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise missing_library("pyarrow", by=f"the record {file}") from error
    try:
        return parquet.read_table(with_end(file)).to_pylist()
    except ArrowException as error:
        raise unreadable("a table is damaged", file, why=shortened(error)) from error


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "step": int(row["step"]), "prompt": row["prompt"]}


def _metrics_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The means over the completions of a step, and the KL per token, where the columns are there."""
    numbers = {name: [x for row in rows if (x := as_number(row.get(name))) is not None] for name in rows[0]}
    found = {f"{name}_sequence": numbers.get(f"{name}_sequence", []) for name in KL}
    found["kl/log_ratio_max"] = [max(x)] if (x := numbers.get("kl/log_ratio_max")) else []
    found["length/mean"] = lengths = numbers.get("length", [])
    rewards = [name for name in rows[0] if name not in OTHERS and not name.startswith("kl/")]
    found["reward"] = numbers[rewards[0]] if len(rewards) == 1 else []  # the weights of several are not in the table
    for name in KL:
        if sum(lengths) > 0 and len(found[f"{name}_sequence"]) == len(lengths):
            found[name] = [sum(found[f"{name}_sequence"]) / sum(lengths)]
    return {name: fmean(values) for name, values in found.items() if values}
