"""What a reward function does to the process that trains, and how long it takes."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
import torch

from klamp.errors import RewardError
from klamp.tasks.base import Example, checked
from klamp.tasks.guarded import guarded

PROMPT = Example(prompt="1+1=", answer="2")


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_good_reward_is_passed_on(seconds):
    assert guarded(lambda example, text: float(len(text)), seconds=seconds)(PROMPT, "two") == 3.0


def test_the_working_directory_is_put_back(tmp_path):
    before = Path.cwd()
    with pytest.raises(RewardError, match=r"(?s)os\.chdir.*1\+1="):
        guarded(lambda example, text: os.chdir(tmp_path) or 1.0, seconds=None)(PROMPT, "2")
    assert Path.cwd() == before


def test_gradients_are_put_back():
    def switches(example, text):
        torch.set_grad_enabled(False)
        return 1.0

    with pytest.raises(RewardError, match="set_grad_enabled"):
        guarded(switches, seconds=None)(PROMPT, "2")
    assert torch.is_grad_enabled()


def test_what_raises_leaves_nothing_behind_either(tmp_path):
    def leaves(example, text):
        os.chdir(tmp_path)
        raise ZeroDivisionError

    before = Path.cwd()
    with pytest.raises(ZeroDivisionError):
        guarded(leaves, seconds=None)(PROMPT, "2")
    assert Path.cwd() == before


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize("raises", [False, True])
def test_a_process_that_it_forks_does_not_come_back(raises, seconds, capfd):
    here = os.getpid()

    def forks(example, text):
        child = os.fork()
        if child == 0:
            return 1 / (0.0 if raises else 1.0)
        return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    try:
        code = guarded(forks, seconds=seconds)(PROMPT, "2")
    finally:
        if os.getpid() != here:
            os._exit(0)  # the fault that this is about: there would be two that test
    assert code == 1.0 and "forked" in capfd.readouterr().err


def test_one_that_hangs_is_named_with_its_prompt():
    on = threading.Event()
    with pytest.raises(RewardError, match=r"(?s)too long.*1\+1=.*completion: '2'"):
        guarded(lambda example, text: float(on.wait(240)), seconds=0.05)(PROMPT, "2")
    on.set()


@pytest.mark.parametrize("seconds", [None, 60.0])
@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()])
def test_an_error_comes_through(seconds, error):
    def breaks(example, text):
        raise error

    with pytest.raises(RewardError, match=f"raised {type(error).__name__}"):
        guarded(checked(breaks, name="mine"), seconds=seconds)(PROMPT, "2")


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_that_no_float_holds_is_not_finite(digits):
    with pytest.raises(RewardError, match="not finite"):
        checked(lambda example, text: 10**digits, name="mine")(PROMPT, "2")
