"""A whole run by a stand-in for verl's program leaves what any run leaves, and ends cleanly however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.training.in_verl.conftest import missing
from tests.training.test_trainer import Recorder
from tests.waiting import is_running, wait_until

from klamp.errors import ConfigError, MissingLibrary, RunFolderError, TrainerFailed, TrainingStopped
from klamp.records import read_record
from klamp.training.backends import train_run
from klamp.training.folders import lines_of

pytestmark = pytest.mark.slow


def test_a_run_leaves_what_any_run_leaves(quick, stand_in, tmp_path):
    stand_in(score=True)
    told, config = Recorder(), quick(log_completions_every=2)
    summary = train_run(config, [told])
    folder = tmp_path / "run"
    assert told.calls[:2] == [("start", 0), ("evaluation", 0)]
    assert (told.info.reference, told.info.processes) == ("a frozen copy, in verl", 1)
    assert told.calls[-2:] == [("end", 4), ("close",)]
    steps = [call for call in told.calls if call[0] in ("step", "evaluation")][1:]
    assert steps == [("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("step", 4), ("evaluation", 4)]
    assert 4 in told.told("checkpoint")
    rows = lines_of(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4, 4]
    second = rows[2]
    assert second["reward"] == 0.25 and second["beta"] == 0.01
    assert second["kl/k3"] == pytest.approx(0.03 * 6 / 4), "from a sum over 6 to the mean over 4 tokens"
    assert second["speed/tokens_per_second"] == 12 * 4 / 2
    assert summary.steps == 4 and summary.final_metrics["kl/k3"] == rows[5]["kl/k3"]
    assert set(summary.before) == set(summary.after) == {name[5:] for name in rows[0] if name.startswith("eval/")}
    written = json.loads((folder / "summary.json").read_text())
    assert written["before"] == dict(summary.before)
    assert not told.told("warning")
    assert sorted(path.name for path in (folder / "verl" / "rollouts").iterdir()) == ["1.jsonl", "2.jsonl", "4.jsonl"]
    assert (folder / "log.txt").read_text().splitlines()[0] == "step 1"
    history = read_record(folder)
    assert [row.metrics["reward"] for row in history.rows] == [0.25] * 4
    assert read_record(folder / "verl" / "metrics.jsonl").source == "verl file log"


def test_a_run_goes_on_from_verls_newest_checkpoint(quick, stand_in, tmp_path):
    stand_in(fail=4)
    with pytest.raises(TrainerFailed, match="verl ended after step 3 of 4") as caught:
        train_run(quick())
    assert "RuntimeError: an engine died" in str(caught.value) and "exit code 3" in str(caught.value)
    assert "global_step_2" in caught.value.__notes__[0]
    stand_in()
    told = Recorder()
    summary = train_run(quick(resume=True), [told])
    assert told.calls[0] == ("start", 2)
    assert told.told("step") == [3, 4]
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward" in row] == [1, 2, 3, 4]
    assert set(summary.before.values()) == {0.0} and set(summary.after.values()) == {0.4}


def test_a_full_disk_is_one_error_that_names_what_is_whole(quick, stand_in, tmp_path):
    stand_in(full=4)
    with pytest.raises(RunFolderError, match=r"(?s)cannot be written any more.*No space left") as caught:
        train_run(quick())
    assert "Traceback" not in str(caught.value)
    whole = tmp_path / "run" / "checkpoints" / "global_step_2"
    assert caught.value.__notes__ == [f"  the state after step 2 is saved in {whole}"]


def test_a_byte_that_changed_since_is_noticed_and_the_newest_whole_one_is_named(quick, stand_in, tmp_path):
    stand_in(patient=True)
    train_run(quick(lr_scheduler_type="constant"))
    saved = tmp_path / "run" / "checkpoints"
    (saved / "global_step_4" / "weights.pt").write_bytes(b"Weights")
    with pytest.raises(RunFolderError, match="the checkpoint is damaged") as caught:
        train_run(quick(resume=True, max_steps=5, lr_scheduler_type="constant"))
    assert "weights.pt" in caught.value.why
    assert f"{saved}/global_step_2 is whole" in caught.value.fix
    assert f"into {saved}/latest_checkpointed_iteration.txt" in caught.value.fix


def test_one_that_ended_before_its_first_checkpoint_begins_anew(quick, stand_in, tmp_path):
    stand_in(fail=1)
    with pytest.raises(TrainerFailed):
        train_run(quick())
    stand_in()
    summary = train_run(quick(resume=True))
    steps = [row["step"] for row in lines_of(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    assert steps == list(range(1, summary.steps + 1)) and summary.before


def helper_of(folder: Path) -> int:
    found = re.search(r"helper (\d+)", (folder / "log.txt").read_text())
    assert found is not None
    return int(found[1])


def has_hung(log: Path) -> bool:
    """Whether the stand-in has stopped answering."""
    return log.exists() and re.search(r"helper \d+\n", log.read_text()) is not None


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("klamp.training.in_verl.process.GRACE", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_trainer_that_stops_answering_is_ended_with_all_its_processes(quick, stand_in, tmp_path, monkeypatch):
    """The clock stands still until it has, and then runs: 4 s from one look to the next."""
    stand_in(hang=2)
    log, now = tmp_path / "run" / "log.txt", count(0.0, 4.0)
    clock = SimpleNamespace(monotonic=lambda: next(now) if has_hung(log) else 0.0, sleep=time.sleep)
    monkeypatch.setattr("klamp.training.in_verl.run.time", clock)
    with pytest.raises(TrainerFailed, match="no step for too long") as caught:
        train_run(quick(stall_timeout=10.0))
    assert "step 2" in str(caught.value), "the end of the log"
    wait_until(lambda: not is_running(helper_of(tmp_path / "run")))  # a killed process takes a moment to be gone


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_processes_and_names_the_checkpoint(number, quick, stand_in, tmp_path):
    stand_in(hang=3)
    log = tmp_path / "run" / "log.txt"

    def interrupt() -> None:
        wait_until(lambda: has_hung(log))
        os.kill(os.getpid(), number)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(TrainingStopped, match="after step 2 of 4") as caught:
        train_run(quick())
    waiting.join()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert "global_step_2" in str(caught.value) and "--resume" in str(caught.value)
    wait_until(lambda: not is_running(helper_of(tmp_path / "run")))  # a killed process takes a moment to be gone


@pytest.mark.usefixtures("impatient")
def test_an_alarm_of_stop_on_ends_the_run(quick, stand_in):
    """One that would never end by itself."""
    stand_in(offset=0.5, hang=3)
    with pytest.raises(TrainingStopped, match="by the alarm step-zero-kl"):
        train_run(quick(stop_on=["step-zero-kl"], max_steps=50))


def test_verl_has_to_be_there(quick, monkeypatch, tmp_path):
    monkeypatch.setattr("klamp.hosts.common.versions.metadata.version", missing)
    with pytest.raises(MissingLibrary, match="not installed here") as caught:
        train_run(quick())
    assert "pip install '.[train,verl]' 'verl[vllm]'" in caught.value.fix
    assert not (tmp_path / "run").exists()


def test_a_launcher_with_several_processes_is_refused(quick, stand_in, monkeypatch):
    stand_in()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="runs in one process"):
        train_run(quick())
