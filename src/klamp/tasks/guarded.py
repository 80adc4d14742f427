"""Keeps a reward function within its bounds: the time it may take, and the process that it is a guest in."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from klamp.errors import RewardError
from klamp.tasks.base import Example, where

Score = Callable[[Example, str], float]


def guarded(score: Score, *, seconds: float | None) -> Score:
    """A reward that hands the process back as it was, and in time.

    Args:
        score: the reward.
        seconds: the longest that it may take for one completion; None: as long as it likes.

    Returns:
        A function of the same signature. It raises RewardError where the reward left the working directory or switched
        gradients, both of which are put back, or took too long. A process that the reward has forked ends where it
        would come back from the reward, with code 1 and one line.
    """
    call = _in_one_process(score)
    call = call if seconds is None else _in_time(call, seconds)

    def guard(example: Example, completion: str) -> float:
        folder, gradients = _folder(), torch.is_grad_enabled()
        changed: list[str] = []
        try:
            value = call(example, completion)
        finally:
            if torch.is_grad_enabled() != gradients:
                changed.append("torch.set_grad_enabled")
                torch.set_grad_enabled(gradients)
            if folder is not None and _folder() != folder:
                changed.append("os.chdir")
                os.chdir(folder)
        if changed:
            raise RewardError(
                "the reward function changed the process that trains",
                got=f"{' and '.join(changed)}\n{where(example, completion)}",
                why="the run writes into its folder and takes gradients in the same process",
                fix="undo it before the function returns: with torch.no_grad(): ..., with contextlib.chdir(...): ...",
            )
        return value

    return guard


def _folder() -> Path | None:
    with suppress(OSError):  # deleted meanwhile
        return Path.cwd()
    return None


def _in_one_process(score: Score) -> Score:
    """The reward, from which no process that it has forked comes back: two would train in one folder."""

    def call(example: Example, completion: str) -> float:
        process = os.getpid()
        try:
            return score(example, completion)
        finally:
            if os.getpid() != process:
                os.write(2, b"klamp: the reward function came back in a process that it had forked, which ends here\n")
                os._exit(1)

    return call


def _in_time(score: Score, seconds: float) -> Score:
    """The reward in a thread that is left to itself once its time is up: code that hangs cannot be stopped."""

    def call(example: Example, completion: str) -> float:
        found: list[float] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                found.append(score(example, completion))
            except BaseException as error:  # raised again below, in the thread that asked
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not found:
            raise RewardError(
                "the reward function took too long",
                got=f"no answer within {seconds:g} seconds\n{where(example, completion)}",
                why="reward_timeout ends a run whose reward hangs",
                fix="mend the function, or raise reward_timeout",
            )
        return found[0]

    return call
