"""A child's output is kept, nothing of it outlives its context or klamp, and what leads it ends as its program does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.waiting import SECONDS, is_running, wait_until

from klamp.errors import RunFolderError
from klamp.training.folders import held
from klamp.training.in_verl import process
from klamp.training.in_verl.process import SHOWN_LINES, Child, members

NEVER = 3600.0
"""Seconds; past the end of any test."""
POLITE = """
import signal, sys, time
def end(*_): print("ended by itself", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
inner += "; print('ready', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", inner], process_group=0).wait()
"""


@pytest.fixture
def child(tmp_path: Path) -> Callable[[str], Child]:
    return lambda code: Child([sys.executable, "-c", code], tmp_path / "run" / "log.txt")


def session_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def test_the_output_is_added_to_the_file_and_its_end_is_quoted(child):
    for _ in range(2):
        with child("import sys; print('out'); print('err', file=sys.stderr); [print(i) for i in range(30)]") as running:
            wait_until(lambda: running.code is not None)
    lines = running.output.read_text().splitlines()
    assert len(lines) == 64
    assert running.last_lines().splitlines() == lines[-SHOWN_LINES:]
    assert Child([], Path("nowhere")).last_lines() == ""


def test_what_ends_when_it_is_asked_is_not_killed(child, monkeypatch):
    monkeypatch.setattr(process, "GRACE", NEVER)
    with child(POLITE) as running:
        wait_until(lambda: "ready" in running.last_lines())
        assert running.code is None
    assert running.code == 0
    assert running.last_lines().endswith("ended by itself")


def test_what_does_not_end_is_killed_in_every_group_of_the_session(child, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    with child(STUBBORN) as running:
        wait_until(lambda: "ready" in running.last_lines())
        inside = members(session_of(running))
        assert len({os.getpgid(pid) for pid in inside}) == 2
    wait_until(lambda: members(session_of(running)) == [])  # a killed process takes a moment to be gone
    assert running.code == -signal.SIGKILL


def test_what_the_program_left_behind_is_ended_too(child, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    leaves = STUBBORN.replace(").wait()", ", stdout=sys.stdout)")
    with child(leaves) as running:
        wait_until(lambda: running.code == 0 and "ready" in running.last_lines())
        assert len(members(session_of(running))) == 1
    wait_until(lambda: members(session_of(running)) == [])


def session_without_a_holder(folder: Path, running: Child) -> int:
    """The session of a child whose holder had the lock of a folder and was killed."""
    holder = os.fork()
    if not holder:
        with held(folder, by="klamp train"), running:
            time.sleep(NEVER)
        os._exit(0)
    wait_until(lambda: "ready" in running.last_lines())
    session = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    return session


def test_where_its_holder_is_killed_all_of_it_ends(child, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    running = child(STUBBORN)
    session = session_without_a_holder(tmp_path, running)
    wait_until(lambda: not members(session))
    with held(tmp_path, by="klamp train"):
        assert running.last_lines() == "ready", "nothing of it had words about that"


def test_until_all_of_it_has_ended_the_folder_is_locked(child, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", NEVER)
    session = session_without_a_holder(tmp_path, child(STUBBORN))
    with pytest.raises(RunFolderError, match="another klamp train works"), held(tmp_path, by="klamp train"):
        pass
    for pid in members(session):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not members(session))
    with held(tmp_path, by="klamp train"):
        pass


def guarded(code: str) -> subprocess.Popen[bytes]:
    """A guard with a program of Python."""
    found = subprocess.Popen(
        [sys.executable, "-I", "-S", process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    found.stdin.write(json.dumps({"words": [sys.executable, "-c", code], "grace": 0.2}).encode() + b"\n")
    found.stdin.flush()
    return found


@pytest.mark.parametrize(
    ("code", "ends_with"),
    [("pass", 0), ("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_it_ends_as_its_program_does(code, ends_with):
    with guarded(code) as found:
        assert found.wait(SECONDS) == ends_with


def test_asked_to_end_it_waits_for_its_program():
    polite = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"
    with guarded(f"{polite}; print('ready', flush=True); time.sleep(600)") as found:
        found.stdout.readline()
        for pid in members(found.pid):
            os.kill(pid, signal.SIGTERM)
        assert found.wait(SECONDS) == 3


def test_members_are_those_of_the_session_that_still_run():
    assert os.getpid() in members(os.getsid(0))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    assert members(other.pid) == [other.pid]
    other.kill()
    wait_until(lambda: not is_running(other.pid))
    assert members(other.pid) == [], "a zombie is over"
    other.wait()
