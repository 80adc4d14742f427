"""Processes on this machine: how many, with what, and what becomes of those that die. The workers here are scripts of
a few lines, which start in a moment; tests/ablation/test_execute.py has the real ones."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from itertools import accumulate
from pathlib import Path

import pytest
from tests.waiting import SECONDS, is_running

from klamp.ablation import local
from klamp.ablation.executor import Update
from klamp.ablation.local import LocalExecutor, local_executor
from klamp.ablation.outcome import Outcome, read_outcome, write_outcome
from klamp.ablation.plan import Plan, grid, run_folder, runs
from klamp.errors import ConfigError, TrainingStopped

RUNS = runs(Plan(base={"max_steps": 3}, arms=grid({"beta": [0.0, 0.1, 0.2, 0.3]}), seeds=(0,)))

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
name = folder.name
arm, beta = name.split("_")[0].replace("-", "=", 1), float(name.split("_")[0][5:])

def step(number, **metrics):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "reward": beta, **metrics}) + "\\n")

def done(state="done", error=""):
    text = json.dumps({"run": name, "arm": arm, "seed": 0, "state": state, "error": error})
    (folder / "outcome.json").write_text(text)

def nap():  # a signal that comes just before a long sleep would only be seen after it
    for _ in range(600):
        time.sleep(0.1)
"""


@pytest.fixture
def executor(tmp_path, monkeypatch):
    """An executor whose processes run a script."""

    def make(body: str, *, workers: int = 2, **settings) -> LocalExecutor:
        script = tmp_path / "worker.py"
        script.write_text(WORKER + textwrap.dedent(body))
        monkeypatch.setattr(local, "COMMAND", (sys.executable, str(script)))
        return LocalExecutor(at_once=workers, **settings)

    return make


def told_by(executor: LocalExecutor, folder: Path) -> list[Update]:
    told: list[Update] = []
    executor.run(RUNS, folder, told.append)
    return told


def outcomes(folder: Path) -> dict[float, Outcome | None]:
    return {run.arm.values["beta"]: read_outcome(run_folder(folder, run)) for run in RUNS}


def test_every_run_runs_and_its_steps_are_reported(executor, tmp_path) -> None:
    told = told_by(executor('print("words"); step(1); time.sleep(1); done()'), tmp_path)
    for run in RUNS:
        mine = [(u.state, u.step) for u in told if u.run == run.name]
        assert mine == [("running", 0), ("running", 1), ("done", 3)]
        assert (run_folder(tmp_path, run) / "log.txt").read_text() == "words\n"
    assert {u.metrics["reward"] for u in told if u.step == 1} == {0.0, 0.1, 0.2, 0.3}


def test_no_more_at_once_than_there_are_workers(executor, tmp_path) -> None:
    """The first two wait for each other, so that they have run at the same time; at no moment were there three."""
    marks = tmp_path / "marks"
    body = f"""
    def mark(sign):
        with open({str(marks)!r}, "a") as file:
            file.write(sign)

    mark("+")
    while beta < 0.2 and Path({str(marks)!r}).read_text().count("+") < 2:
        time.sleep(0.01)
    mark("-")
    done()
    """
    told = told_by(executor(body, workers=2), tmp_path)
    at_work = list(accumulate(1 if sign == "+" else -1 for sign in marks.read_text()))
    assert len(at_work) == 8 and max(at_work) == 2 and at_work[-1] == 0
    assert [update.state for update in told if update.state != "running"] == ["done"] * 4


ENDS = """
if beta == 0.1:
    os.kill(os.getpid(), signal.SIGKILL)
if beta == 0.2:
    print("the last words"); sys.exit(7)
if beta == 0.3:
    done("failed", "its reward\\nis wrong"); sys.exit(1)
done()
"""


def test_a_run_that_dies_does_not_sink_the_others(executor, tmp_path) -> None:
    told = told_by(executor(ENDS), tmp_path)
    found = outcomes(tmp_path)
    assert found[0.0].state == "done"
    assert found[0.1].state == found[0.2].state == found[0.3].state == "failed"
    log = run_folder(tmp_path, RUNS[1]) / "log.txt"
    killed, empty, where = found[0.1].error.splitlines()
    assert "killed (SIGKILL)" in killed and "memory" in killed and empty == "its log is empty" and str(log) in where
    assert found[0.1].values == {"beta": 0.1} and found[0.1].arm == "beta=0.1" and not found[0.1].numbers
    assert "code 7" in found[0.2].error and "the last words" in found[0.2].error
    assert found[0.3].error == "its reward\nis wrong", "what the worker wrote stays"
    last = {update.run: update for update in told}
    assert [last[run.name].state for run in RUNS] == ["done", "failed", "failed", "failed"]
    assert last[RUNS[1].name].text == killed


def test_an_old_outcome_does_not_stand_for_a_run_that_died(executor, tmp_path) -> None:
    own = run_folder(tmp_path, RUNS[0])
    own.mkdir(parents=True)
    write_outcome(own, Outcome(run=RUNS[0].name, arm="beta=0", seed=0, state="done"))
    told_by(executor("sys.exit(3)"), tmp_path)
    assert outcomes(tmp_path)[0.0].state == "failed"


SAVES = """
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    step(1)
    nap()
except KeyboardInterrupt:
    (folder / "saved").touch()
    sys.exit(130)
"""


class Interrupts(list[Update]):
    """Sends this process a signal once two runs have taken a step, and again when told that they are stopping."""

    def __init__(self, number: int, times: int = 1) -> None:
        super().__init__()
        self.number, self.times = number, times

    def __call__(self, update: Update) -> None:
        self.append(update)
        at_work = sum(u.state == "running" and u.step == 1 for u in self)
        if (at_work == 2 and update.step == 1) or (self.times > 1 and update.state == "stopping"):
            self.times -= update.state == "stopping"
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_passed_on_once_and_waits_until_all_have_saved(executor, tmp_path, number) -> None:
    handler = signal.getsignal(number)
    told = Interrupts(number)
    with pytest.raises(TrainingStopped) as caught:
        executor(SAVES).run(RUNS, tmp_path, told)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert "4 of 4 runs not done" in caught.value.what and caught.value.why
    assert "repeat the command" in caught.value.fix
    saved = [run.name for run in RUNS if (run_folder(tmp_path, run) / "saved").exists()]
    assert saved == [RUNS[0].name, RUNS[1].name]
    assert [u.run for u in told if u.state == "stopping"] == saved
    assert set(outcomes(tmp_path).values()) == {None}, "nothing failed: the next start goes on"
    assert signal.getsignal(number) is handler


def test_a_second_interrupt_kills(executor, tmp_path) -> None:
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN); step(1); nap(); done()"
    with pytest.raises(TrainingStopped):
        executor(body).run(RUNS, tmp_path, Interrupts(signal.SIGINT, times=2))
    assert set(outcomes(tmp_path).values()) == {None}


def test_an_error_in_the_display_leaves_no_process_behind(executor, tmp_path) -> None:
    def broken(update: Update) -> None:
        if update.step == 1:
            raise ZeroDivisionError

    body = f"Path({str(tmp_path)!r}, str(os.getpid()) + '.pid').touch(); step(1); nap()"
    with pytest.raises(ZeroDivisionError):
        executor(body, workers=1).run(RUNS, tmp_path, broken)
    (process,) = (int(file.stem) for file in tmp_path.glob("*.pid"))
    assert not is_running(process)


def test_it_works_outside_the_main_thread(executor, tmp_path) -> None:
    given = (RUNS, tmp_path, lambda update: None)
    thread = threading.Thread(target=executor("done()").run, args=given, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert {outcome.state for outcome in outcomes(tmp_path).values()} == {"done"}


# environment ---------------------------------------------------------------------------------------------------------


def test_a_worker_has_its_threads_its_device_and_the_parents_modules(executor, tmp_path, monkeypatch) -> None:
    """And a process group of its own: Ctrl-C on the terminal must reach it once, through the parent."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "only_here.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    body = """
    from only_here import VALUE
    own_group = os.getpgrp() == os.getpid()
    words = os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"], VALUE, own_group
    print(*words)
    done()
    """
    told_by(executor(body, workers=2, threads=5, devices=("GPU-a", "GPU-b")), tmp_path)
    logs = {(run_folder(tmp_path, run) / "log.txt").read_text() for run in RUNS}
    assert logs == {"5 GPU-a 3 True\n", "5 GPU-b 3 True\n"}


@pytest.mark.parametrize(
    ("cores", "count", "asked", "workers", "threads"),
    [(8, 3, None, 3, 2), (2, 12, None, 2, 1), (8, 12, 3, 3, 2), (2, 12, 5, 5, 1), (4, 1, None, 1, 4)],
)
def test_the_cores_are_shared_out(monkeypatch, cores, count, asked, workers, threads) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(local, "visible_devices", lambda: ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = local_executor(count, workers=asked)
    assert (found.at_once, found.threads, found.devices) == (workers, threads, ())
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local_executor(count, workers=asked).threads == 7, "what the user set is kept"


@pytest.mark.parametrize(("cores", "workers"), [(6, 6), (None, 1)])
def test_where_the_system_does_not_say_which_cores_are_ours_all_count(monkeypatch, cores, workers) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert local_executor(12, cpu=True).at_once == workers


def test_windows_is_refused_in_words(monkeypatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(ConfigError, match="does not run on Windows") as caught:
        local_executor(1, cpu=True)
    assert "WSL" in caught.value.fix


def test_with_accelerators_each_has_a_worker(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = local_executor(12)
    assert (found.at_once, found.devices) == (2, ("0", "1")) and "GPUs 0, 1" in found.describe()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert local_executor(12, workers=4).devices == ("3", "5")
    assert local_executor(12, cpu=True).devices == ()
