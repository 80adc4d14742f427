"""The folder of an ablation, and what is looked at before the first run."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from klamp.ablation.execute import (
    check_folder,
    find_folder,
    load_shared,
    open_folder,
)
from klamp.ablation.outcome import Outcome, is_done, write_outcome
from klamp.ablation.plan import PLAN, Arm, Plan, grid, read_plan, run_folder, runs
from klamp.errors import ConfigError, DataError, RewardError, RunFolderError, UnknownNameError

PLAN_A = Plan(name="a", base={"max_steps": 5, "report_to": ()}, arms=grid({"beta": [0.0, 0.1]}), seeds=(0, 1))


def changed(**changes) -> Plan:
    return dataclasses.replace(PLAN_A, **changes)


def test_a_folder_holds_its_plan_and_takes_it_again(tmp_path) -> None:
    folder = tmp_path / "out"
    open_folder(PLAN_A, folder)
    assert read_plan(folder) == PLAN_A and (folder / "runs").is_dir()
    open_folder(PLAN_A, folder)
    same = changed(name="other", base={"report_to": (), "max_steps": 5})
    check_folder(same, folder)
    assert yaml.safe_load((folder / PLAN).read_text())["arms"] == {"beta=0": {"beta": 0.0}, "beta=0.1": {"beta": 0.1}}


def test_arms_and_seeds_can_be_added(tmp_path) -> None:
    open_folder(PLAN_A, tmp_path / "out")
    more = changed(arms=grid({"beta": [0.5, 0.0, 0.1]}), seeds=(1, 0, 7))
    open_folder(more, tmp_path / "out")
    assert read_plan(tmp_path / "out") == more
    with pytest.raises(RunFolderError, match="another ablation"):
        check_folder(PLAN_A, tmp_path / "out")


@pytest.mark.parametrize(
    "plan",
    [
        changed(base={"max_steps": 6}),
        changed(seeds=(0,)),
        changed(kl_prompts=7),
        changed(arms=grid({"beta": [0.0, 0.2]})),
        changed(arms=(Arm(name="beta=0"), PLAN_A.arms[1])),
    ],
)
def test_another_plan_is_refused(tmp_path, plan) -> None:
    open_folder(PLAN_A, tmp_path / "out")
    before = (tmp_path / "out" / PLAN).read_text()
    with pytest.raises(RunFolderError) as caught:
        open_folder(plan, tmp_path / "out")
    error = caught.value
    assert error.got == str(tmp_path / "out" / PLAN) and error.why and "--output_dir" in error.fix
    assert (tmp_path / "out" / PLAN).read_text() == before


def test_other_files_are_never_written_over(tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(RunFolderError) as caught:
            check_folder(PLAN_A, tmp_path / name)
        assert caught.value.fix
    (tmp_path / "empty").mkdir()
    check_folder(PLAN_A, tmp_path / "empty")
    check_folder(PLAN_A, tmp_path / "none")


@pytest.mark.parametrize("text", ["", "[]", "name: a", "a: [", "name: a\nbase: 3\narms: {a: 1}\nseeds: [0]\n"])
def test_a_damaged_plan_is_named(tmp_path, text) -> None:
    (tmp_path / PLAN).write_text(text)
    with pytest.raises(RunFolderError, match="cannot be read") as caught:
        check_folder(PLAN_A, tmp_path)
    assert str(tmp_path / PLAN) in str(caught.value.got)


def test_the_same_command_finds_its_folder_again(tmp_path) -> None:
    first = find_folder(PLAN_A, tmp_path)
    assert first == tmp_path / "ablation-a-001"
    open_folder(PLAN_A, first)
    assert find_folder(PLAN_A, tmp_path) == first
    assert find_folder(changed(seeds=(0, 1, 2)), tmp_path) == first, "it would add to it"
    other = changed(base={"max_steps": 6})
    assert find_folder(other, tmp_path) == tmp_path / "ablation-a-002"
    open_folder(other, tmp_path / "ablation-a-002")
    assert find_folder(other, tmp_path) == tmp_path / "ablation-a-002"
    assert find_folder(changed(name="b c/d"), tmp_path).parent == tmp_path


def test_failed_runs_are_not_done(tmp_path) -> None:
    for run, state in zip(runs(PLAN_A), ("done", "failed"), strict=False):
        run_folder(tmp_path, run).mkdir(parents=True)
        write_outcome(run_folder(tmp_path, run), Outcome(run=run.name, arm=run.arm.name, seed=0, state=state))
    assert [is_done(tmp_path, run) for run in runs(PLAN_A)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"task": "missing.jsonl"}, DataError),
        ({"task": "arithmetik"}, UnknownNameError),
        ({"reward": "tests.training.rewards:nowhere"}, (ConfigError, RewardError)),
        ({"task": "tests.training.rewards:nowhere"}, UnknownNameError),
    ],
)
def test_inputs_that_cannot_be_used_are_refused_before_any_run(plan_with, change, error) -> None:
    plan = plan_with(seeds=(0,))
    arms = (Arm(name="fine"), Arm(name="wrong", values=change))
    with pytest.raises(error, match="the arm 'wrong'"):
        load_shared(runs(dataclasses.replace(plan, arms=arms)))


def test_the_base_model_is_made_once_and_shown(monkeypatch) -> None:
    made, told = [], []

    def fake(spec, *, progress):
        made.append(spec)
        progress(1, 2, 3.0)

    monkeypatch.setattr("klamp.training.models.make_ready", fake)
    monkeypatch.setattr("klamp.training.models.load_tokenizer", lambda spec: None)
    arms = grid({"train_size": [2, 4], "beta": [0.0, 0.1]})
    load_shared(runs(Plan(base={"eval_size": 2}, arms=arms, seeds=(0, 1))), lambda *at: told.append(at))
    assert made == ["builtin"] * 2 and told == [(1, 2, 3.0)] * 2
