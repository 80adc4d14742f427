"""Processes on this machine: how many, with what, and what becomes of those that die. The workers are short scripts."""

import os
import pickle
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tests.waiting import wait_for

from klamp.errors import TrainingStopped
from klamp.lab.ablate import execute
from klamp.lab.ablate.execute import LocalExecutor, local_executor
from klamp.lab.ablate.plan import Plan, grid, run_folder, runs
from klamp.lab.ablate.results import Outcome, read_outcome, write_outcome

RUNS = runs(Plan(base={"max_steps": 3}, arms=grid({"beta": [0.0, 0.1, 0.2, 0.3]}), seeds=(0,)))

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
name = folder.name
arm, beta = name.split("_")[0].replace("-", "=", 1), float(name.split("_")[0][5:])

def done(state="done", error=""):
    text = json.dumps({"run": name, "arm": arm, "seed": 0, "state": state, "error": error})
    (folder / "outcome.json").write_text(text)

def nap():  # a signal that comes just before a long sleep would only be seen after it
    for _ in range(600):
        time.sleep(0.1)
"""


@pytest.fixture
def executor(tmp_path, monkeypatch):
    def make(body: str, **settings) -> LocalExecutor:
        script = tmp_path / "worker.py"
        script.write_text(WORKER + textwrap.dedent(body))
        monkeypatch.setattr(execute, "COMMAND", (sys.executable, str(script)))
        return LocalExecutor(at_once=2, **settings)

    return make


def told_by(executor: LocalExecutor, folder: Path) -> dict[str, Outcome | None]:
    told: dict[str, Outcome | None] = {}
    executor.run(RUNS, folder, lambda run, outcome: told.update({run.name: outcome}))
    return told


def outcomes(folder: Path) -> dict[float, Outcome | None]:
    return {run.arm.values["beta"]: read_outcome(run_folder(folder, run)) for run in RUNS}


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
    killed, empty, where = found[0.1].error.splitlines()
    assert "SIGKILL" in killed and "memory" in killed and empty.endswith("none")
    assert str(run_folder(tmp_path, RUNS[1]) / "log.txt") in where
    assert found[0.1].values == {"beta": 0.1} and found[0.1].arm == "beta=0.1" and not found[0.1].numbers
    assert "code 7" in found[0.2].error and "the last words" in found[0.2].error
    assert found[0.3].error == "its reward\nis wrong", "what the worker wrote stays"
    assert [told[run.name] for run in RUNS] == list(found.values())


SAVES = """
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    (folder / "ready").touch()
    nap()
except KeyboardInterrupt:
    (folder / "saved").touch()
    sys.exit(130)
"""


def interrupt_when_two_are_at_work(folder: Path, number: int, times: int = 1) -> None:
    """Send this process a signal, so many times, once two of its workers are ready."""

    def send() -> None:
        for name in (RUNS[0].name, RUNS[1].name):
            wait_for(folder / "runs" / name / "ready")
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_passed_on_once_and_waits_until_all_have_saved(executor, tmp_path, number) -> None:
    handler = signal.getsignal(number)
    made = executor(SAVES)
    interrupt_when_two_are_at_work(tmp_path, number)
    with pytest.raises(TrainingStopped) as caught:
        told_by(made, tmp_path)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert "repeat the command" in caught.value.fix
    saved = [run.name for run in RUNS if (run_folder(tmp_path, run) / "saved").exists()]
    assert saved == [RUNS[0].name, RUNS[1].name]
    assert set(outcomes(tmp_path).values()) == {None}, "nothing failed: the next start goes on"
    assert signal.getsignal(number) is handler


def test_a_second_interrupt_kills(executor, tmp_path) -> None:
    made = executor('signal.signal(signal.SIGINT, signal.SIG_IGN); (folder / "ready").touch(); nap(); done()')
    interrupt_when_two_are_at_work(tmp_path, signal.SIGINT, times=2)
    with pytest.raises(TrainingStopped):
        told_by(made, tmp_path)
    assert set(outcomes(tmp_path).values()) == {None}


def test_a_worker_has_its_run_its_threads_and_the_parents_modules(executor, tmp_path, monkeypatch) -> None:
    """And a process group of its own: Ctrl-C on the terminal must reach it once, through the parent."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "only_here.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    body = """
    import pickletools
    from only_here import VALUE
    own_group = os.getpgrp() == os.getpid()
    words = [word for _, word, _ in pickletools.genops(os.read(0, 1 << 16))]  # without a run's slow imports
    print(os.environ["OMP_NUM_THREADS"], VALUE, own_group, arm in words)
    done()
    """
    told_by(executor(body, threads=5), tmp_path)
    assert {(run_folder(tmp_path, run) / "log.txt").read_text() for run in RUNS} == {"5 3 True True\n"}
    assert pickle.loads(pickle.dumps(RUNS)) == RUNS


@pytest.mark.parametrize(("cores", "count", "asked", "workers", "threads"), [(8, 3, None, 3, 2), (2, 12, 5, 5, 1)])
def test_the_cores_are_shared_out_and_a_gpu_is_not(monkeypatch, cores, count, asked, workers, threads) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = local_executor(count, workers=asked, cpu=True)
    assert (found.at_once, found.threads) == (workers, threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local_executor(count, workers=asked, cpu=True).threads == 7, "what the user set is kept"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert local_executor(count, workers=asked).at_once == (asked or 1)


def test_an_old_outcome_does_not_stand_for_a_run_that_died(executor, tmp_path) -> None:
    own = run_folder(tmp_path, RUNS[0])
    own.mkdir(parents=True)
    write_outcome(own, Outcome(run=RUNS[0].name, arm="beta=0", seed=0, state="done"))
    told_by(executor("sys.exit(3)"), tmp_path)
    assert outcomes(tmp_path)[0.0].state == "failed"
