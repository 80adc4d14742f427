"""Runs that are there already, compared as if an ablation had made them."""

import json
from pathlib import Path

import pytest
import yaml
from tests.training.conftest import TINY

from klamp.errors import DataError, RunFolderError
from klamp.lab.ablate import one_run
from klamp.lab.ablate.execute import compare
from klamp.lab.ablate.one_run import perform
from klamp.lab.ablate.plan import Plan, as_runs, grid, runs
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.folders import plain

pytestmark = pytest.mark.slow


def configured(**changes) -> TrainConfig:
    return TrainConfig.from_flat({"max_steps": 2, **changes})


def finished_run(folder: Path, *, steps: int = 2, **changes) -> tuple[Path, TrainConfig]:
    (folder / "checkpoints" / f"step-{steps:06d}" / "policy").mkdir(parents=True)
    summary = {"steps": steps, "rl_skill": "addition", "before": {}, "after": {}, "final_metrics": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    config = configured(**changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    return folder, config


def test_it_has_the_numbers_of_an_ablation_that_ran_them(llama, tmp_path) -> None:
    base = {"model": llama, **TINY, "eval_size": 3, "max_steps": 3}
    given = []
    for beta in (0.0, 0.05):
        folder = tmp_path / f"output_beta_{beta}"
        config = TrainConfig.from_flat({**base, "beta": beta, "output_dir": str(folder), "save_every": 1})
        train_run(config)
        given.append((folder, config))
    before = {path: path.stat().st_mtime_ns for folder, _ in given for path in folder.rglob("*")}
    told = []
    result = compare(as_runs(given), tmp_path / "out", lambda run: told.append(run.name))
    assert told == ["beta-0_seed-0", "beta-0.05_seed-0"]
    made = runs(Plan(base=base, arms=grid({"beta": [0.0, 0.05]}), seeds=(0,)))
    assert result.outcomes == tuple(perform(run, tmp_path / "ablated") for run in made)
    assert {"table.md", "table.json", "frontier.png"} <= {file.name for file in result.files}
    assert before == {path: path.stat().st_mtime_ns for folder, _ in given for path in folder.rglob("*")}


def test_arms_are_named_by_what_differs_and_seeds_are_no_difference(tmp_path) -> None:
    given = [
        finished_run(tmp_path / "a", beta=0.0, seed=0, eval_every=1, output_dir="a"),
        finished_run(tmp_path / "b", beta=0.01, seed=0, output_dir="b"),
        finished_run(tmp_path / "c", beta=0.01, seed=4, report_to=()),
    ]
    found = as_runs(given, kl_prompts=7)
    assert [run.name for run in found.values()] == ["beta-0_seed-0", "beta-0.01_seed-0", "beta-0.01_seed-4"]
    assert [run.arm.values for run in found.values()] == [{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.01}]
    assert {run.kl_prompts for run in found.values()} == {7}
    seeds = as_runs(given[1:])
    assert [run.arm.name for run in seeds.values()] == ["base", "base"]


def test_other_tasks_are_refused(tmp_path) -> None:
    given = [finished_run(tmp_path / "a"), finished_run(tmp_path / "b", task="describe")]
    with pytest.raises(DataError, match="different tasks") as caught:
        as_runs(given)
    assert f"task is 'arithmetic' in {tmp_path / 'a'}" in caught.value.got and "describe" in caught.value.got
    fewer = finished_run(tmp_path / "d", train_size=9)
    assert [run.arm.name for run in as_runs([given[0], fewer]).values()] == ["train_size=0", "train_size=9"]


def test_a_run_that_is_not_finished_is_refused_before_anything_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(one_run, "outcome_of", lambda *_: 1 / 0)
    done = finished_run(tmp_path / "a")
    half, empty = finished_run(tmp_path / "b", steps=1, beta=0.1), (tmp_path / "c", configured(beta=0.2))
    damaged = finished_run(tmp_path / "d", beta=0.3)
    (damaged[0] / "summary.json").write_text('{"steps": ')
    for other in (half, empty, damaged):
        with pytest.raises(DataError, match="not finished") as caught:
            compare(as_runs([done, other]), tmp_path / "out")
        assert str(other[0]) == caught.value.got and f"--resume {other[0]}" in caught.value.fix
    with pytest.raises(RunFolderError, match="not empty"):
        compare(as_runs([done, finished_run(tmp_path / "e", beta=0.5)]), tmp_path)


def test_one_variant_and_seed_counts_once(tmp_path) -> None:
    given = [finished_run(tmp_path / name, beta=0.1) for name in "ab"]
    with pytest.raises(DataError, match="the same variant with the same seed") as caught:
        as_runs([*given, finished_run(tmp_path / "c")])
    assert str(tmp_path / "a") in caught.value.got and str(tmp_path / "b") in caught.value.got
