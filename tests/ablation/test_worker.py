"""The process of one run: what it reads, what it tells, how it ends."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace

import filelock
import pytest
from tests.waiting import SECONDS

from klamp.ablation import one_run as performing
from klamp.ablation import worker
from klamp.ablation.execute import open_folder
from klamp.ablation.executor import Update
from klamp.ablation.outcome import Outcome
from klamp.ablation.plan import run_folder, runs, sees
from klamp.ablation.worker import DONE, FAILED, INTERRUPTED, alone, main, teller
from klamp.errors import TrainingStopped

UPDATE = Update(run="a", state="running", step=1, metrics={"reward": 0.5})


@pytest.fixture
def run(plan_with):
    return runs(plan_with())[0]


@pytest.fixture
def own(plan_with, run, tmp_path):
    """The folder of the run, ready for a worker."""
    open_folder(plan_with(), tmp_path)
    folder = run_folder(tmp_path, run)
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def handlers_and_logging(monkeypatch) -> None:
    """A worker sets both for its whole process."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)


@pytest.mark.parametrize(
    ("raised", "state", "code"),
    [
        (None, "done", DONE),
        (None, "failed", FAILED),
        (KeyboardInterrupt(), "", INTERRUPTED),
        (TrainingStopped("stopped"), "", INTERRUPTED),
    ],
)
def test_the_exit_code_says_how_it_ended(run, own, tmp_path, monkeypatch, raised, state, code) -> None:
    seen = []

    def fake(asked, folder, report):
        seen.append((asked, folder))
        report(UPDATE)
        if raised is not None:
            raise raised
        return Outcome(run=run.name, arm="a", seed=0, state=state)

    monkeypatch.setattr(performing, "perform", fake)
    reads, writes = os.pipe()
    assert main([str(own), str(writes)]) == code
    os.close(writes)
    with os.fdopen(reads) as lines:
        assert [json.loads(line)["metrics"] for line in lines] == [{}, {"reward": 0.5}]
    assert main([str(own)]) == code, "without somebody who listens"
    assert seen == [(run, tmp_path)] * 2


def test_once_nobody_reads_the_run_is_interrupted() -> None:
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    tell = teller(writes)
    assert not os.get_inheritable(writes), "what the run starts does not hold the pipe open"
    tell(UPDATE)
    os.close(reads)
    with pytest.raises(KeyboardInterrupt):
        tell(UPDATE)
    os.close(writes)


def test_a_second_worker_of_the_same_run_waits(own, monkeypatch) -> None:
    """One that lost its command may still be saving its last step."""
    order, refused = [], threading.Event()

    def lock_descriptor(descriptor: int) -> None:
        assert not filelock.lock_descriptor(descriptor, blocking=False)
        refused.set()
        filelock.lock_descriptor(descriptor)

    def second() -> None:
        with alone(own):
            order.append("second")

    with alone(own):
        monkeypatch.setattr(worker, "lock_descriptor", lock_descriptor)
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert refused.wait(SECONDS)
        order.append("first")
    thread.join(SECONDS)
    assert order == ["first", "second"]


def test_where_no_file_can_be_locked_nothing_is_waited_for(own, monkeypatch) -> None:
    def lock_descriptor(descriptor: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(worker, "lock_descriptor", lock_descriptor)
    with alone(own), alone(own):
        pass


@pytest.mark.usefixtures("own")
def test_a_worker_sees_its_run_or_not(run, tmp_path) -> None:
    assert sees(tmp_path, run)
    assert not sees(tmp_path / "elsewhere", run) and not sees(tmp_path, replace(run, seed=9))
    (tmp_path / "plan.yaml").write_text("arms: [")
    assert not sees(tmp_path, run)
