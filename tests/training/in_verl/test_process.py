"""A child's output is kept, and nothing of it outlives its context, whatever group it is in and whatever it ignores."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from klamp.errors import RunFolderError
from klamp.training.in_verl import process
from klamp.training.in_verl.guard import members
from klamp.training.in_verl.process import SHOWN_LINES, Child
from klamp.training.lock import held

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


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.02)


def session_of(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


def test_the_output_is_added_to_the_file_and_its_end_is_quoted(child):
    for _ in range(2):
        with child("import sys; print('out'); print('err', file=sys.stderr); [print(i) for i in range(30)]") as running:
            wait_for(lambda: running.code is not None)
    lines = running.output.read_text().splitlines()
    assert len(lines) == 64
    assert running.last_lines().splitlines() == lines[-SHOWN_LINES:]
    assert Child([], Path("nowhere")).last_lines() == ""


def test_the_code_is_what_the_program_returned(child):
    with child("import sys; sys.exit(7)") as running:
        wait_for(lambda: running.code is not None)
        assert running.code == 7


def test_what_ends_when_it_is_asked_is_not_killed(child):
    with child(POLITE) as running:
        wait_for(lambda: "ready" in running.last_lines())
        assert running.code is None
        started = time.monotonic()
    assert running.code == 0
    assert running.last_lines().endswith("ended by itself")
    assert time.monotonic() - started < process.GRACE


def test_what_does_not_end_is_killed_in_every_group_of_the_session(child, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    with child(STUBBORN) as running:
        wait_for(lambda: "ready" in running.last_lines())
        inside = members(session_of(running))
        assert len({os.getpgid(pid) for pid in inside}) == 2
    assert members(session_of(running)) == []
    assert running.code == -signal.SIGKILL


def test_what_the_program_left_behind_is_ended_too(child, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    leaves = STUBBORN.replace(").wait()", ", stdout=sys.stdout)")
    with child(leaves) as running:
        wait_for(lambda: running.code == 0 and "ready" in running.last_lines())
        assert len(members(session_of(running))) == 1
    assert members(session_of(running)) == []


def test_an_error_within_ends_it(child):
    running = child(POLITE)

    def fail() -> None:
        with running:
            wait_for(lambda: "ready" in running.last_lines())
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert members(session_of(running)) == []


def test_where_its_holder_is_killed_all_of_it_ends_and_until_then_the_folder_is_locked(child, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 2.0)
    running = child(STUBBORN)
    holder = os.fork()
    if not holder:
        with held(tmp_path, by="klamp train"), running:
            time.sleep(240)
        os._exit(0)
    wait_for(lambda: "ready" in running.last_lines())
    session = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    with pytest.raises(RunFolderError, match="another klamp train works"), held(tmp_path, by="klamp train"):
        pass
    wait_for(lambda: not members(session))
    with held(tmp_path, by="klamp train"):
        assert running.last_lines() == "ready", "nothing of it had words about that"
