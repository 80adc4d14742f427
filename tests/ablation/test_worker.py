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
from klamp.ablation.executor import Update, read_run, write_run
from klamp.ablation.outcome import Outcome
from klamp.ablation.plan import run_folder, runs
from klamp.ablation.worker import DONE, FAILED, INTERRUPTED, alone, main, teller, working_folder
from klamp.errors import TrainingStopped

UPDATE = Update(run="a", state="running", step=1, metrics={"reward": 0.5})


@pytest.fixture
def run(plan_with):
    return runs(plan_with())[0]


@pytest.fixture
def own(run, tmp_path):
    """The folder of the run, ready for a worker."""
    folder = run_folder(tmp_path, run)
    write_run(folder, run)
    return folder


@pytest.fixture(autouse=True)
def handlers_and_logging(monkeypatch) -> None:
    """A worker sets both for its whole process."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)


def test_a_run_survives_its_file(run, own) -> None:
    assert read_run(own) == run
    assert [file.name for file in own.iterdir()] == ["run.json"]


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


def test_a_worker_that_does_not_see_the_run_has_a_folder_of_its_own(run, own, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert working_folder(run, tmp_path) == tmp_path
    for other, there in ((run, tmp_path / "elsewhere"), (replace(run, seed=9), tmp_path)):
        found = working_folder(other, there)
        assert found.parent == tmp_path and found.stat().st_mode & 0o077 == 0, "nobody else reads it"
