"""Processes that watch over each other: who is the reason for a wait in vain, and what ends whom; real ones are in
test_lost_processes.py."""

from __future__ import annotations

import logging
import os
import signal
from itertools import count
from types import SimpleNamespace

import pytest
from tests.waiting import wait_until
from torch.distributed import DistNetworkError, HashStore

from klamp.errors import RewardError, TrainerFailed
from klamp.training import peers as module
from klamp.training.peers import LOST, Peers

BROKEN = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.fixture
def three(monkeypatch):
    """Three processes that wrote down that they live.

    The clock moves when one of them looks at it and by what one sleeps, and meanwhile those that are watched over give
    a sign of life: none is taken to be gone because the machine is slow.
    """
    store, now, found = HashStore(), count(step=0.01), list[Peers]()

    def sleep(seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            next(now)
        for each in found:
            if each._thread.is_alive():
                each._beat()

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=sleep))
    found += [Peers(rank, 3, timeout=60.0, store=store) for rank in range(3)]
    for each in found:
        each.at("the reward function", step=4)
    return found


def lost(one: Peers) -> str:
    """What the error of a wait in vain says."""
    with pytest.raises(TrainerFailed) as caught, one.explaining():
        raise RuntimeError(BROKEN)
    return str(caught.value)


def test_one_that_is_watched_over_says_by_itself_that_it_lives(three, monkeypatch):
    monkeypatch.setattr(module, "BEAT", 0.01)
    with three[1].watch():
        before = three[0].others()[1].beat
        wait_until(lambda: three[0].others()[1].beat > before + 1)


def test_one_without_a_sign_of_life_is_gone(three):
    with three[2].watch():
        three[2]._leave(LOST)  # it waits in vain as well
        said = lost(three[0])
    assert "process 1 of 3" in said and "is gone" in said and "step 4: the reward function" in said
    assert "process 2 of" not in said


def test_one_that_lives_and_does_not_wait_hangs(three):
    with three[1].watch(), three[2].watch(), three[2].waiting():
        said = lost(three[0])
    assert "process 1 of 3" in said and "hangs" in said and "process 2 of" not in said
    assert "raise process_timeout if a process may take longer than 60 s" in said


def test_one_that_left_with_an_error_is_named_with_it(three):
    def fail() -> None:
        with three[1].watch():
            raise MemoryError("no room\nat all")

    with pytest.raises(MemoryError):
        fail()
    said = lost(three[0])
    assert "process 1 of 3" in said and "left the run: MemoryError: no room;" in said
    assert "process 2 of" not in said, "whoever only waits is not named"


def test_where_nobody_is_missing_the_wait_itself_is_the_error(three):
    for each in three[1:]:
        each._leave(LOST)
    assert "lost each other" in lost(three[0])


def test_other_errors_stay_what_they_are(three):
    for error in (RuntimeError("out of memory"), RewardError("gloo and so on")):
        with pytest.raises(type(error), match=str(error)), three[0].explaining():
            raise error
    with pytest.raises(RuntimeError, match="gloo"), Peers().explaining():
        raise RuntimeError(BROKEN)
    assert not three[0].sign.end


@pytest.mark.parametrize(("agent", "who"), [("True", "the launcher is gone"), ("False", "process 0 is gone")])
def test_a_store_that_is_gone_says_who_is(three, monkeypatch, agent, who):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setattr(three[0], "others", lambda: (_ for _ in ()).throw(RuntimeError("Connection reset")))
    assert who in lost(three[0])


def test_a_store_whose_connection_is_cut_is_not_asked_again(three, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    asked: list[str] = []

    class Cut:
        def __getattr__(self, name: str):
            def fail(*_: object) -> None:
                asked.append(name)
                raise DistNetworkError("Broken pipe")

            return fail

    three[0].store = Cut()
    for step in (5, 6, 7):
        three[0].at("generation", step=step)
    assert "the launcher is gone" in lost(three[0])
    assert asked == ["set"]


def test_a_long_wait_is_said_once(three, caplog, monkeypatch):
    monkeypatch.setattr(module, "SAY", 0.0)
    with three[0].waiting(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            three[0]._say(three[0].others())
    assert caplog.text.count("process 0 waits for process 1 (step 4: the reward function") == 1


@pytest.fixture
def killed(monkeypatch):
    """Signals that were sent, and exits that were asked for."""
    found = []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: found.append(number))
    monkeypatch.setattr(module.os, "_exit", lambda code: found.append(code) or over.set())
    over = SimpleNamespace(set=lambda: None)
    return found, over


def test_a_launcher_that_is_gone_ends_the_step_and_in_the_end_the_process(killed, monkeypatch):
    found, over = killed
    monkeypatch.setattr(module, "BEAT", 0.01)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    one = Peers(timeout=0.05)
    over.set = one._over.set
    one.parent = os.getppid() + 1
    one._watch()
    assert found == [signal.SIGTERM, 1]


def test_a_shell_that_ends_ends_nothing(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert Peers().parent is None


def test_one_that_hangs_is_ended_by_force_once_another_one_gave_up(three, killed, monkeypatch):
    found, over = killed
    monkeypatch.setattr(module, "BEAT", 0.01)
    over.set = three[1]._over.set
    three[1].timeout = 0.1
    three[0]._leave(LOST)
    three[1]._watch()
    assert found == [1]
