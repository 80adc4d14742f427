"""The lock on a folder: one process has it, everyone else is told who; nobody waits for the dead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.waiting import wait_for, wait_until

from klamp.errors import RunFolderError
from klamp.training import lock
from klamp.training.lock import LOCK, held


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


def test_a_file_system_without_locks_is_refused_in_words(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunFolderError, match="cannot be locked") as caught, held(tmp_path, by="x"):
        pass
    assert "No locks available" in caught.value.got and "--output_dir" in caught.value.fix


@pytest.mark.parametrize("text", ["", "[]", '{"host"', "\xff"])
def test_what_a_dead_or_damaged_holder_left_holds_nothing(tmp_path, text):
    (tmp_path / LOCK).write_text(text, encoding="latin-1")
    with held(tmp_path, by="y"), pytest.raises(RunFolderError, match="another y works"), held(tmp_path, by="z"):
        pass
    assert not (tmp_path / LOCK).exists()


def test_a_child_that_is_given_the_descriptor_holds_the_folder_on(tmp_path):
    with held(tmp_path, by="x"):
        child = subprocess.Popen(["sleep", "240"], pass_fds=lock.descriptors())
        file = os.dup(lock.descriptors()[0])
    assert lock.descriptors() == []
    os.close(file)
    child.kill()
    child.wait()
    assert can_hold(tmp_path)
