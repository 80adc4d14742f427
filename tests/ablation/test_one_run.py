"""One run from its first step to its outcome, in this process."""

from __future__ import annotations

import json

import pytest
from tests.training import rewards
from tests.training.conftest import rows_of, steps_of

from klamp.ablation.executor import Update
from klamp.ablation.measure import measure
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import COLUMNS, Outcome, read_outcome
from klamp.ablation.plan import Run, run_folder, runs
from klamp.training.folders import newest_policy

pytestmark = pytest.mark.slow

NUMBERS = {column.name for column in COLUMNS if column.name.partition("/")[0] not in ("rl", "retained")} - {
    "kl/teacher"
}
CHANGING = ("seconds",)
"""Numbers that no seed fixes."""


def numbers_of(outcome: Outcome) -> dict[str, float]:
    return {name: value for name, value in outcome.numbers.items() if name not in CHANGING}


@pytest.fixture
def run(plan_with) -> Run:
    """The one with a KL."""
    return runs(plan_with())[1]


class Told(list[Update]):
    """What was told; interrupts once a step is done."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.stop_at = stop_at

    def __call__(self, update: Update) -> None:
        self.append(update)
        if update.step == self.stop_at and update.metrics and update.state == "running":
            raise KeyboardInterrupt


def test_a_run_leaves_its_files_and_its_outcome(run, tmp_path) -> None:
    told = Told()
    outcome = perform(run, tmp_path, told)
    own = run_folder(tmp_path, run)
    assert read_outcome(own) == outcome and outcome.state == "done" and not outcome.error
    assert (outcome.run, outcome.arm, outcome.seed, outcome.values) == (run.name, "beta=0.05", 0, {"beta": 0.05})
    summary, rows = json.loads((own / "summary.json").read_text()), rows_of(own, keep_speed=True)
    assert outcome.before == summary["before"] and outcome.after == summary["after"]
    assert set(outcome.after) == {"addition", "subtraction", "reversal"} and outcome.rl_skill == "addition"
    assert outcome.numbers.keys() == NUMBERS
    assert numbers_of(outcome) == {
        **measure(run.config, own),
        "beta": summary["final_metrics"]["beta"],
        "price": summary["final_metrics"]["beta/price"],
    }
    steps = [row for row in rows if "reward" in row]
    assert outcome.numbers["seconds"] == pytest.approx(sum(row["speed/step_seconds"] for row in steps))
    states = [update.state for update in told]
    assert states[:5] == ["running"] * 5 and set(states[5:-1]) == {"measuring"} and states[-1] == "done"
    assert [update.step for update in told[:5]] == [0, 1, 2, 3, 4] and {u.steps for u in told} == {4}
    assert told[1].metrics == {name: steps[0][name] for name in ("reward", "kl/exact", "kl/k3", "length/mean", "beta")}
    assert told[-1].metrics == outcome.numbers


def test_without_kl_the_distance_is_measured_all_the_same(plan_with, tmp_path) -> None:
    (run,) = runs(plan_with(sweep={"beta": [0.0]}, seeds=(0,)))
    outcome = perform(run, tmp_path, Told())
    assert outcome.numbers["kl/reverse"] > 1e-5 and outcome.numbers["kl/forward"] > 1e-5
    assert outcome.numbers["price"] == 0
    assert "kl/k3" not in steps_of(run_folder(tmp_path, run))[0], "no reference was loaded"


def test_a_run_that_was_interrupted_while_it_was_measured_is_not_trained_again(run, tmp_path) -> None:
    whole = perform(run, tmp_path, Told())
    own = run_folder(tmp_path, run)
    (own / "outcome.json").unlink()
    before = (own / "metrics.jsonl").read_text()
    told = Told()
    assert perform(run, tmp_path, told) == whole
    assert not [update for update in told if update.state == "running"]
    assert (own / "metrics.jsonl").read_text() == before


def test_a_reward_that_fails_is_the_runs_outcome_and_is_tried_again(plan_with, tmp_path) -> None:
    (run,) = runs(plan_with(sweep={"beta": [0.05]}, seeds=(0,), reward="tests.training.rewards:breaks"))
    # 9 held-out prompts before, then 12 completions a step: the third step's
    rewards.STATE.update(calls=0, break_at=9 + 12 + 12 + 9 + 5)
    told = Told()
    outcome = perform(run, tmp_path, told)
    assert outcome.state == "failed" and not outcome.numbers and not outcome.after
    first, *rest = outcome.error.splitlines()
    assert first == "the reward function tests.training.rewards:breaks raised RuntimeError"
    assert "the judge is out to lunch" in outcome.error and "the state after step 2 is saved" in rest[-1]
    assert read_outcome(run_folder(tmp_path, run)) == outcome
    assert told[-1].state == "failed" and told[-1].text == first and told[-1].step == 2
    rewards.STATE.update(calls=0, break_at=-1)
    assert perform(run, tmp_path, Told()).state == "done"


def test_any_error_is_an_outcome_that_says_what_it_was(run, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("klamp.ablation.one_run.train_run", lambda *_: 1 / 0)
    outcome = perform(run, tmp_path, Told())
    assert outcome.error == "ZeroDivisionError: division by zero"
    assert "Traceback" in caplog.text, "the log has the rest"


def test_a_run_stopped_by_an_alarm_has_failed(plan_with, tmp_path) -> None:
    """Not an interrupt: the same would happen again."""
    changes = {"stop_on": ("dr-grpo-with-kl",), "loss_type": "dr_grpo", "advantage_baseline": "mean", "reward": ""}
    (run,) = runs(plan_with(sweep={"beta": [0.05]}, seeds=(0,), **changes))
    outcome = perform(run, tmp_path, Told())
    assert outcome.state == "failed" and "by the alarm dr-grpo-with-kl" in outcome.error


def test_runs_by_trl_are_measured_alike_one_after_the_other(plan_with, tmp_path) -> None:
    """All weights and an adapter; TRL's checkpoints count updates, and hold the model at their top."""
    plan = plan_with(sweep={"lora_r": [0, 4]}, seeds=(0,), backend="trl", beta=0.05, learning_rate=5e-3)
    for run in runs(plan):
        outcome = perform(run, tmp_path, Told())
        assert outcome.state == "done", outcome.error
        assert outcome.numbers.keys() == NUMBERS
        assert outcome.numbers["kl/reverse"] > 1e-5
        assert run_folder(tmp_path, run) / "checkpoints" / "checkpoint-4" == newest_policy(run_folder(tmp_path, run))
        (run_folder(tmp_path, run) / "outcome.json").unlink()
        told = Told()
        assert perform(run, tmp_path, told) == outcome, "measured again"
        assert not [update for update in told if update.state == "running"], "and not trained again"
