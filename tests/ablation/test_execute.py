"""A whole ablation: real worker processes, one killed, one whose reward fails; then the same again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ablation.test_one_run import numbers_of
from tests.training.conftest import rows_of

from klamp.ablation.execute import Result, execute, open_folder
from klamp.ablation.executor import Update
from klamp.ablation.local import LocalExecutor
from klamp.ablation.one_run import perform
from klamp.ablation.outcome import Outcome, read_outcome, write_outcome
from klamp.ablation.plan import Plan, Run, run_folder, runs
from klamp.errors import TrainingStopped
from klamp.training import checkpoint

pytestmark = pytest.mark.slow

REWARD = "tests.ablation.rewards:digits_or_trouble"
TROUBLE = "KLAMP_TEST_TROUBLE"


class InThisProcess:
    """An executor without processes."""

    def __init__(self, performs: Callable[[Run, Path], object] = perform) -> None:
        self.performs, self.ran = performs, []

    def describe(self) -> str:
        return "this process"

    def run(self, runs, folder, tell) -> None:
        for run in runs:
            self.ran.append(run.name)
            self.performs(run, folder)


def same(one: Outcome | None, other: Outcome | None) -> bool:
    """Equal but for wall times."""
    assert one is not None and other is not None
    return replace(one, numbers=numbers_of(one)) == replace(other, numbers=numbers_of(other))


def test_runs_that_die_fail_or_are_stopped_are_done_by_the_next_call(plan_with, tmp_path, monkeypatch) -> None:
    """Two arms, two seeds, real processes. One run is done; one is killed with SIGKILL in its fourth step, one has a
    reward that raises there, and Ctrl-C stops the last one. Then nothing troubles them any more."""
    plan = plan_with(reward=REWARD, save_every=2, eval_every=0, max_steps=5)
    every = runs(plan)
    names = [run.name for run in every]
    trouble = {names[1]: "kill", names[2]: "raise", names[3]: "wait", "until": str(tmp_path / "go on")}
    monkeypatch.setenv(TROUBLE, json.dumps(trouble))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told: list[Update] = []

    def watch(update: Update) -> None:
        """Ctrl-C once the others have ended and the last one has taken two steps; it goes on when it has been told."""
        told.append(update)
        ended = {u.run for u in told if u.state in ("done", "failed")}
        stepped = any(u.run == names[3] and u.step >= 2 for u in told)
        if len(ended) == 3 and stepped and not any(u.state == "stopping" for u in told):
            os.kill(os.getpid(), signal.SIGINT)
        if update.state == "stopping":
            (tmp_path / "go on").touch()

    with pytest.raises(TrainingStopped, match="3 of 4 runs not done"):
        execute(plan, tmp_path / "out", LocalExecutor(at_once=2), tell=watch)
    folders = [run_folder(tmp_path / "out", run) for run in every]
    done, killed, broken, stopped = (read_outcome(own) for own in folders)
    assert [u.state for u in told[:4]] == ["waiting"] * 4
    steps = [u.step for u in told if u.run == names[0] and u.state == "running"]
    assert steps == sorted(steps) and steps[0] == 0
    assert done is not None and done.state == "done" and stopped is None
    assert killed is not None and "killed (SIGKILL)" in killed.error and str(folders[1] / "log.txt") in killed.error
    assert checkpoint.newest(folders[1]).name == "step-000002"
    assert broken is not None and broken.error.startswith(f"the reward function {REWARD} raised RuntimeError")
    assert "the state after step 3 is saved" in broken.error
    assert "Traceback" in (folders[2] / "log.txt").read_text()
    left = checkpoint.load_state(checkpoint.newest(folders[3]))["step"]
    assert 2 <= left < 5, "it finished its step and saved it"

    monkeypatch.setenv(TROUBLE, "{}")
    told.clear()
    again = execute(plan, tmp_path / "out", InThisProcess(), tell=told.append)
    assert [u.state for u in told[:4]] == ["kept", "waiting", "waiting", "waiting"]
    assert [outcome.state for outcome in again.outcomes] == ["done"] * 4 and again.outcomes[0] == done
    InThisProcess().run(every, tmp_path / "whole", lambda update: None)
    for run, own in zip(every, folders, strict=True):
        whole = run_folder(tmp_path / "whole", run)
        assert same(read_outcome(own), read_outcome(whole)), "never troubled, in another process: the same numbers"
        assert rows_of(own) == rows_of(whole)
    _check_files(again)


def _check_files(result: Result) -> None:
    assert {file.name for file in result.files} == {"table.md", "table.json", "frontier.png"}
    assert all(file.stat().st_size > 0 for file in result.files)
    table = json.loads((result.folder / "table.json").read_text())
    arms = [(arm["arm"], arm["done"], arm["failures"]) for arm in table["rows"]]
    assert arms == [("beta=0", 2, []), ("beta=0.05", 2, [])]
    for i, arm in enumerate(table["rows"]):
        values = [outcome.numbers["kl/reverse"] for outcome in result.outcomes[i::2]]
        assert arm["cells"]["kl/reverse"]["mean"] == pytest.approx(sum(values) / 2)
        assert arm["cells"]["kl/reverse"]["values"] == pytest.approx(values)


def by_hand(run: Run, folder: Path) -> None:
    """Done, without training."""
    run_folder(folder, run).mkdir(parents=True, exist_ok=True)
    ids = {"run": run.name, "arm": run.arm.name, "seed": run.seed, "values": run.arm.values}
    write_outcome(run_folder(folder, run), Outcome(**ids, rl_skill="a", numbers={"kl/reverse": 0.1, "reward": 0.5}))


def done_in(folder: Path, plan: Plan) -> None:
    """Every run of a plan, done by hand."""
    open_folder(plan, folder)
    for run in runs(plan):
        by_hand(run, folder)


def test_more_seeds_are_added_to_what_is_done(plan_with, tmp_path) -> None:
    done_in(tmp_path, plan_with(seeds=(0, 1), max_steps=1))
    more = plan_with(seeds=(0, 1, 2), max_steps=1)
    here = InThisProcess(by_hand)
    result = execute(more, tmp_path, here)
    assert here.ran == ["beta-0_seed-2", "beta-0.05_seed-2"] and len(result.outcomes) == 6
