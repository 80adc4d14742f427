"""What every executor shares: interrupts that are only noted, and the error of an ablation that was stopped."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from klamp.ablation.executor import noting_interrupts, stopped
from klamp.ablation.outcome import Outcome, write_outcome
from klamp.ablation.plan import Arm, Plan, run_folder, runs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_noted_and_cuts_nothing(number: signal.Signals) -> None:
    noted: list[str] = []
    with noting_interrupts(lambda: noted.append("again")):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        noted.append("the work went on")
    assert noted == ["again", "again", "the work went on"]


def test_afterwards_an_interrupt_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    noting = noting_interrupts(lambda: None)
    noting.__enter__()
    assert signal.getsignal(signal.SIGINT) not in before
    with pytest.raises(RuntimeError):  # however the work ends
        noting.gen.throw(RuntimeError())  # pyright: ignore[reportAttributeAccessIssue]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_in_another_thread_signals_are_left_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with noting_interrupts(lambda: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_the_error_counts_what_is_not_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    every = runs(Plan(name="p", base={}, arms=(Arm(name="a", values={"beta": 0.1}),), seeds=(0, 1, 2)))
    done = every[0]
    folder = run_folder(tmp_path, done)
    folder.mkdir(parents=True)
    write_outcome(folder, Outcome(run=done.name, arm=done.arm.name, seed=done.seed, values={}))
    error = stopped(every, tmp_path)
    assert "2 of 3 runs not done" in str(error)
    assert "the same command again" in error.fix
