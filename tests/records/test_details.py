"""What lies beside a record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from klamp.errors import DataError
from klamp.records import read_record
from klamp.records.klamp_run import Details, read_details, runs_in
from klamp.training.config import TrainConfig
from klamp.training.runlog import plain


def klamp_run(folder: Path, **changes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(TrainConfig.from_flat(changes))))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return folder


def test_a_run_that_ended(tmp_path: Path) -> None:
    folder = klamp_run(tmp_path / "run", beta=0.04)
    (folder / "versions.json").write_text(json.dumps({"klamp": "0.1.0", "torch_threads": 1}))
    (folder / "summary.json").write_text(json.dumps({"before": {"addition": 0.5}, "after": {"addition": 1}}))
    found = read_details(folder)
    assert (found.before, found.after) == ({"addition": 0.5}, {"addition": 1.0})
    assert found.versions == {"klamp": "0.1.0", "torch_threads": "1"}
    config = read_record(folder).config
    assert {name for name in config if config[name] != found.defaults[name]} == {"beta"}, "lists and tuples are equal"


def test_a_run_that_did_not(tmp_path: Path) -> None:
    found = read_details(klamp_run(tmp_path / "run"))
    assert found.defaults["beta"] == 0.01 and found.versions == found.before == found.after == {}


def test_a_damaged_summary(tmp_path: Path) -> None:
    folder = klamp_run(tmp_path / "run")
    (folder / "summary.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_details(folder)


def test_of_other_records_nothing_is_known(tmp_path: Path) -> None:
    assert read_details(tmp_path) == read_details(tmp_path / "trainer_state.json") == Details()


def test_a_sweep(tmp_path: Path) -> None:
    first, second = klamp_run(tmp_path / "runs" / "b"), klamp_run(tmp_path / "runs" / "a")
    failed = tmp_path / "runs" / "c"
    failed.mkdir()
    (tmp_path / "runs" / "table.md").write_text("")
    assert runs_in(tmp_path) == ([second, first], [failed])


def test_the_runs_of_a_sweep_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["beta-0_seed-0", "beta-0_seed-10", "beta-0.01_seed-2", "beta-0.1_seed-0", "beta-10_seed-0", "none_seed-0"]
    for name in reversed(names):
        klamp_run(tmp_path / "runs" / name)
    assert [folder.name for folder in runs_in(tmp_path)[0]] == names


def test_what_is_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "runs" / "Nov21_10-00-00_host").mkdir(parents=True)
    assert runs_in(tmp_path) == ([], []), "TRL keeps its event files in a folder of that name"
    run = klamp_run(tmp_path / "run")
    assert runs_in(run) == runs_in(run / "metrics.jsonl") == ([], [])
