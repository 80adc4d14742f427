"""An ablation of real runs: what it leaves, how it goes on, one run of it, and runs that were made before."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.training import rewards
from tests.training.conftest import TINY, rows_of, steps_of
from tests.waiting import wait_until

from klamp.cli.ablate import parse_ablate
from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.lab import checkpoint
from klamp.lab.ablate import one_run
from klamp.lab.ablate.execute import PLAN, LocalExecutor, check_folder, compare, execute, load_shared
from klamp.lab.ablate.one_run import measured, numbers_of, perform
from klamp.lab.ablate.plan import Arm, Plan, Run, as_runs, grid, plan_text, run_folder, runs
from klamp.lab.ablate.results import read_outcome
from klamp.lab.backends import train_run
from klamp.lab.config import TrainConfig
from klamp.lab.folders import checkpoint_folders, newest_policy, plain

pytestmark = pytest.mark.slow

REWARD = "tests.ablation.rewards:digits_or_trouble"
TROUBLE = "KLAMP_TEST_TROUBLE"


class InThisProcess:
    def __init__(self, performs: Callable[[Run, Path], object] = perform) -> None:
        self.performs, self.ran = performs, []

    def describe(self) -> str:
        return "this process"

    def run(self, runs, folder, tell) -> None:
        for run in runs:
            self.ran.append(run.name)
            self.performs(run, folder)


def test_runs_that_die_fail_or_are_stopped_are_done_by_the_next_call(plan_with, tmp_path, monkeypatch) -> None:
    """Two arms, two seeds, real processes. One run is done; one is killed with SIGKILL in its fourth step, one has a
    reward that raises there, and Ctrl-C stops the last one. Then nothing troubles them any more."""
    plan = plan_with(reward=REWARD, save_every=2, eval_every=0, max_steps=5)
    every = runs(plan)
    names = [run.name for run in every]
    trouble = {names[1]: "kill", names[2]: "raise", names[3]: "wait", "until": str(tmp_path / "go on")}
    monkeypatch.setenv(TROUBLE, json.dumps(trouble))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folders = [run_folder(tmp_path / "out", run) for run in every]

    def interrupt() -> None:
        """Ctrl-C once the others have ended and the last one has taken two steps; it waits until it was told."""
        wait_until(lambda: all((own / "outcome.json").exists() for own in folders[:3]))
        wait_until(lambda: checkpoint_folders(folders[3]) != [])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        (tmp_path / "go on").touch()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(TrainingStopped):
        execute(plan, tmp_path / "out", LocalExecutor(at_once=2))
    done, killed, broken, stopped = (read_outcome(own) for own in folders)
    assert done is not None and done.state == "done" and stopped is None
    assert killed is not None and "SIGKILL" in killed.error and str(folders[1] / "log.txt") in killed.error
    assert checkpoint.checkpoints(folders[1])[-1].name == "step-000002"
    assert broken is not None and broken.error.startswith(f"the reward function {REWARD} raised RuntimeError")
    assert "the state after step 3 is saved" in broken.error
    assert "Traceback" in (folders[2] / "log.txt").read_text()
    left = checkpoint.load_state(checkpoint.checkpoints(folders[3])[-1])["step"]
    assert 2 <= left < 5, "it finished its step and saved it"

    monkeypatch.setenv(TROUBLE, "{}")
    here = InThisProcess()
    again = execute(plan, tmp_path / "out", here)
    assert here.ran == names[1:]
    assert [outcome.state for outcome in again.outcomes] == ["done"] * 4 and again.outcomes[0] == done
    InThisProcess().run(every, tmp_path / "whole", lambda *_: None)
    for run, own in zip(every, folders, strict=True):
        whole = run_folder(tmp_path / "whole", run)
        assert read_outcome(own) == read_outcome(whole), "never troubled, in another process: the same numbers"
        assert rows_of(own) == rows_of(whole)
    assert {file.name for file in again.files} == {"table.md", "table.json", "frontier.png"}


PLAN_A = Plan(name="a", base={"max_steps": 5, "report_to": ()}, arms=grid({"beta": [0.0, 0.1]}), seeds=(0, 1))


def test_a_folder_holds_its_plan_and_takes_it_again(tmp_path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / PLAN).write_text(plan_text(PLAN_A))
    check_folder(folder, replace(PLAN_A, base={"report_to": (), "max_steps": 5}))
    assert parse_ablate(["--plan", str(folder / PLAN)])[0].arms == PLAN_A.arms
    for change in ({"base": {"max_steps": 6}}, {"seeds": (0,)}, {"arms": grid({"beta": [0.0, 0.2]})}):
        with pytest.raises(RunFolderError, match="another ablation") as caught:
            check_folder(folder, replace(PLAN_A, **change))
        assert caught.value.got == str(folder) and "--output_dir" in caught.value.fix


def test_other_files_are_never_written_over(tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / PLAN).write_text("a: [")
    for name in ("full", "file", "damaged"):
        with pytest.raises(KlampError):
            check_folder(tmp_path / name, PLAN_A)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        check_folder(tmp_path / name, PLAN_A)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"task": "missing.jsonl"}, DataError), ({"reward": "tests.training.rewards:nowhere"}, ConfigError)],
)
def test_inputs_that_cannot_be_used_are_refused_before_any_run(plan_with, change, error) -> None:
    arms = (Arm(name="fine"), Arm(name="wrong", values=change))
    with pytest.raises(error, match="the arm 'wrong'"):
        load_shared(runs(replace(plan_with(seeds=(0,)), arms=arms)))


NUMBERS = {"kl/reverse", "kl/forward", "kl/reverse_sequence", "kl/forward_sequence", "length", "reward", "entropy"}
NUMBERS |= {"beta"}


@pytest.fixture
def run(plan_with) -> Run:
    return runs(plan_with())[1]


def test_a_run_leaves_its_files_and_its_outcome(run, tmp_path) -> None:
    outcome = perform(run, tmp_path)
    own = run_folder(tmp_path, run)
    assert read_outcome(own) == outcome and outcome.state == "done" and not outcome.error
    assert (outcome.run, outcome.arm, outcome.seed, outcome.values) == (run.name, "beta=0.05", 0, {"beta": 0.05})
    summary = json.loads((own / "summary.json").read_text())
    assert outcome.before == summary["before"] and outcome.after == summary["after"]
    assert set(outcome.after) == {"addition", "subtraction", "reversal"} and outcome.rl_skill == "addition"
    assert outcome.numbers.keys() == NUMBERS
    measurement = numbers_of(measured(run.config, newest_policy(own)))
    assert outcome.numbers == {**measurement, "beta": summary["final_metrics"]["beta"]}


def test_a_run_that_was_interrupted_while_it_was_measured_is_not_trained_again(run, tmp_path) -> None:
    whole = perform(run, tmp_path)
    own = run_folder(tmp_path, run)
    (own / "outcome.json").unlink()
    before = (own / "metrics.jsonl").read_text()
    assert perform(run, tmp_path) == whole
    assert (own / "metrics.jsonl").read_text() == before


def test_a_reward_that_fails_is_the_runs_outcome_and_is_tried_again(plan_with, tmp_path) -> None:
    (run,) = runs(plan_with(sweep={"beta": [0.05]}, seeds=(0,), reward="tests.training.rewards:breaks"))
    # 9 held-out prompts before, then 12 completions a step: the third step's
    rewards.STATE.update(calls=0, break_at=9 + 12 + 12 + 9 + 5)
    outcome = perform(run, tmp_path)
    assert outcome.state == "failed" and not outcome.numbers and not outcome.after
    first, *rest = outcome.error.splitlines()
    assert first == "the reward function tests.training.rewards:breaks raised RuntimeError"
    assert "the judge is out to lunch" in outcome.error and "the state after step 2 is saved" in rest[-1]
    assert read_outcome(run_folder(tmp_path, run)) == outcome
    rewards.STATE.update(calls=0, break_at=-1)
    assert perform(run, tmp_path).state == "done"


def test_any_error_is_an_outcome_that_says_what_it_was(run, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(one_run, "train_run", lambda *_: 1 / 0)
    assert perform(run, tmp_path).error == "ZeroDivisionError: division by zero"
    assert "Traceback" in caplog.text, "the log has the rest"


def test_a_run_whose_command_has_died_stops_and_can_be_continued(plan_with, tmp_path) -> None:
    (run,) = runs(plan_with(sweep={"beta": [0.05]}, seeds=(0,), max_steps=200, save_every=1, eval_every=0))
    own = run_folder(tmp_path, run)
    own.mkdir(parents=True)
    command = [sys.executable, "-m", "klamp.lab.ablate.one_run", str(own)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(run))
    process.stdin.flush()
    wait_until(lambda: newest_policy(own) is not None)
    process.stdin.close()
    assert process.wait() == 130 and read_outcome(own) is None
    assert steps_of(own)[-1]["step"] < 200


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
