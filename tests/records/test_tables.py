"""TRL's tables of completions, with klamp's KL of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from klamp.diagnostics.doctor import examine
from klamp.errors import DataError
from klamp.records import read_record


def table(folder: Path, step: int, **columns: list[Any]) -> Path:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    count = len(columns["prompt"])
    file = folder / f"completions_{step:05d}.parquet"
    parquet.write_table(pyarrow.table({"step": [step] * count, "completion": ["x"] * count, **columns}), file)
    return file


def of_klamp(folder: Path, step: int, kl: float) -> Path:
    return table(
        folder,
        step,
        prompt=["p", "p", "q", "q"],
        accuracy=[1.0, 0.0, 1.0, 0.0],
        advantage=[1.0, -1.0, 1.0, -1.0],
        length=[10.0, 30.0, 10.0, 30.0],
        **{"kl/k1_sequence": [kl, 3 * kl] * 2, "kl/k3_sequence": [kl] * 4, "kl/log_ratio_max": [0.1, 0.2, 0.3, 0.4]},
    )


def test_the_kl_of_each_completion_becomes_that_of_its_step(tmp_path: Path) -> None:
    for step in (1, 2):
        file = of_klamp(tmp_path / "completions", step, kl=0.1 * (step - 1))
    history = read_record(tmp_path)
    assert history.source == "TRL table of completions"
    assert [(row.step, row.prompts) for row in history.rows] == [(1, 2), (2, 2)]
    assert history.rows[1].metrics == pytest.approx(
        {
            "kl/k1_sequence": 0.2,
            "kl/k3_sequence": 0.1,
            "kl/k1": 0.01,
            "kl/k3": 0.005,
            "kl/log_ratio_max": 0.4,
            "length/mean": 20.0,
            "reward": 0.5,
        }
    )
    assert not history.cautions
    assert read_record(file).rows == history.rows[1:], "a single one"


def test_a_jump_in_the_tables_is_found(tmp_path: Path) -> None:
    for step in range(1, 9):
        of_klamp(tmp_path, step, kl=60.0 if step == 7 else 0.1 * (step - 1))
    found = {finding.alarm.name: finding.first_step for finding in examine(read_record(tmp_path)).findings}
    assert found == {"kl-spike": 7}


def test_tables_of_trls_own_have_no_kl_and_that_is_said(tmp_path: Path) -> None:
    table(tmp_path, 1, prompt=["p"], accuracy=[1.0], style=[0.5], advantage=[0.0])
    history = read_record(tmp_path)
    assert "klamp.trl's trainer writes" in history.cautions[0]
    assert "reward" not in history.names, "the weights of several are not in the table"
    assert examine(history).blind


def test_what_is_no_table_of_completions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="a table is damaged"):
        read_record(tmp_path / "broken.parquet")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="row 1 is no completion"):
        read_record(tmp_path / "data.parquet")
