"""A whole ablation: real worker processes, one killed, one whose reward fails; then the same again."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.training.conftest import rows_of
from tests.waiting import wait_until

from klamp.cli.ablate import parse_ablate
from klamp.errors import ConfigError, DataError, KlampError, RunFolderError, TrainingStopped
from klamp.lab import checkpoint
from klamp.lab.ablate.execute import PLAN, LocalExecutor, check_folder, execute, load_shared
from klamp.lab.ablate.one_run import perform
from klamp.lab.ablate.plan import Arm, Plan, Run, grid, plan_text, run_folder, runs
from klamp.lab.ablate.results import read_outcome
from klamp.lab.folders import checkpoint_folders

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
