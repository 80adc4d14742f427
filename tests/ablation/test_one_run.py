"""One run from its first step to its outcome, in this process."""

import json
import pickle
import subprocess
import sys

import pytest
from tests.training import rewards
from tests.training.conftest import steps_of
from tests.waiting import wait_until

from klamp.lab.ablate import one_run
from klamp.lab.ablate.one_run import measured, numbers_of, perform
from klamp.lab.ablate.plan import Run, run_folder, runs
from klamp.lab.ablate.results import read_outcome
from klamp.lab.folders import newest_policy

pytestmark = pytest.mark.slow

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
