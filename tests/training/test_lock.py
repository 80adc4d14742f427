"""The lock on a folder: one process has it, everyone else is told who; nobody waits for the dead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.waiting import wait_for, wait_until

from klamp.errors import RunFolderError
from klamp.training import lock
from klamp.training.lock import LOCK, held

DEAD = {"command": "klamp train", "process": 2**22 + 7, "host": socket.gethostname(), "since": "yesterday"}


def child_that_holds(folder: Path) -> int:
    """The number of a child that has the lock until it is killed."""
    number = os.fork()
    if not number:
        with held(folder, by="klamp train"):
            (folder / "ready").touch()
            time.sleep(240)
        os._exit(0)
    wait_for(folder / "ready")
    return number


def test_the_second_one_is_told_who_has_it(tmp_path):
    child = child_that_holds(tmp_path)
    try:
        with pytest.raises(RunFolderError, match="another klamp train works") as caught, held(tmp_path, by="me"):
            pass
        since = json.loads((tmp_path / LOCK).read_text())["since"]
        assert f"process {child} on {socket.gethostname()} since {since}" in caught.value.got
        assert caught.value.why and "--output_dir" in caught.value.fix
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()
    with held(tmp_path, by="me"):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid(), "the dead hold nothing"


def test_it_is_gone_once_its_holder_is_done(tmp_path):
    for _ in range(2):
        with held(tmp_path, by="klamp train"), pytest.raises(RunFolderError), held(tmp_path, by="klamp train"):
            pass
        assert not (tmp_path / LOCK).exists()


def test_a_folder_that_is_deleted_meanwhile_ends_nothing(tmp_path):
    with held(tmp_path / "..", by="x"):
        (tmp_path / ".." / LOCK).unlink()


def test_a_file_that_its_holder_takes_away_is_not_the_lock(tmp_path, monkeypatch):
    opened, real = [], fcntl.flock

    def flock(file, how):
        real(file, how)
        opened.append(file)
        if len(opened) == 1:  # its holder lets go between our opening and our locking
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(tmp_path, by="x"):
        assert len(opened) == 2 and opened[0].closed
        assert os.path.samestat(os.fstat(opened[1].fileno()), (tmp_path / LOCK).stat())


def test_a_child_of_the_holder_does_not_hold_it(tmp_path):
    with held(tmp_path, by="x"):
        child = os.fork()
        if not child:
            time.sleep(240)
            os._exit(0)
    try:
        with held(tmp_path, by="y"):
            assert (tmp_path / LOCK).exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def can_hold(folder: Path) -> bool:
    """Whether nobody has the lock."""
    with suppress(RunFolderError), held(folder, by="y"):
        return True
    return False


def test_a_holder_that_was_killed_does_not_live_on_in_its_children(tmp_path):
    reader, writer = os.pipe()
    holder = os.fork()
    if not holder:
        with held(tmp_path, by="x"):
            orphan = os.fork()
            if orphan:
                os.write(writer, str(orphan).encode())
            time.sleep(240)
        os._exit(0)
    orphan = int(os.read(reader, 20))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        wait_until(lambda: can_hold(tmp_path))  # the orphan lets go first thing, but when it gets to it nobody knows
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.fixture(params=["file system", "operating system"])
def no_locks(monkeypatch, request):
    """A file system that knows no locks, as some network file systems; a system that has no flock."""

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    if request.param == "file system":
        monkeypatch.setattr(fcntl, "flock", flock)
    else:
        monkeypatch.setitem(sys.modules, "fcntl", None)


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"process": os.getpid()}, {"process": 1}])
def test_without_locks_what_the_file_says_counts(tmp_path, no_locks, changes):
    (tmp_path / LOCK).write_text(json.dumps(DEAD | changes))
    with pytest.raises(RunFolderError, match="klamp train works") as caught, held(tmp_path, by="y"):
        pass
    assert str(tmp_path / LOCK) in caught.value.fix and (tmp_path / LOCK).exists()


@pytest.mark.parametrize("text", [json.dumps(DEAD), "", "[]", '{"host"', json.dumps(DEAD | {"process": "x"})])
def test_without_locks_the_dead_and_the_unreadable_hold_nothing(tmp_path, no_locks, text):
    (tmp_path / LOCK).write_text(text)
    with held(tmp_path, by="y"), pytest.raises(RunFolderError), held(tmp_path, by="z"):
        pass
    assert not (tmp_path / LOCK).exists()


def test_where_a_signal_would_ask_nobody_a_process_is_taken_to_be_alive(monkeypatch):
    monkeypatch.setattr(os, "name", "nt")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signal 0 is Ctrl-C there"))
    assert lock._may_live(DEAD) and not lock._may_live({})


def test_a_lock_is_waited_for_or_not(tmp_path):
    file = tmp_path / "x"
    with file.open("wb") as first, file.open("wb") as second:
        lock.flock(first, wait=True)
        with pytest.raises(BlockingIOError) as caught:
            lock.flock(second, wait=False)
        assert caught.value.errno in lock.TAKEN
