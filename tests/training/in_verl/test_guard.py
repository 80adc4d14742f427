"""The guard of verl's program ends as it ends, and ends all of its session once its standard input does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.training.in_verl.test_process import STUBBORN
from tests.waiting import SECONDS, is_running, wait_until

from klamp.training.in_verl import process
from klamp.training.in_verl.process import members


def guarded(code: str, *, grace: float = 0.2) -> subprocess.Popen[bytes]:
    """A guard with a program of Python."""
    found = subprocess.Popen(
        [sys.executable, "-I", "-S", process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    found.stdin.write(json.dumps({"words": [sys.executable, "-c", code], "grace": grace}).encode() + b"\n")
    found.stdin.flush()
    return found


@pytest.mark.parametrize(
    ("code", "ends_with"),
    [("pass", 0), ("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_it_ends_as_its_program_does(code, ends_with):
    with guarded(code) as found:
        assert found.wait(SECONDS) == ends_with


def test_once_nobody_holds_its_input_all_of_the_session_ends():
    found = guarded(STUBBORN)
    assert found.stdout.readline() == b"ready\n"
    assert len(members(found.pid)) == 3, "the guard, its program and what that has started"
    found.stdin.close()
    assert found.wait(SECONDS) == 128 + 9
    wait_until(lambda: members(found.pid) == [])  # a killed process takes a moment to be gone
    found.stdout.close()


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
