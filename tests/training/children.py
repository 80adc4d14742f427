"""Runs in processes of their own: a server imports the libraries once, and every child is a fork of it."""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from tests.waiting import SECONDS, wait_for

__all__ = ["SECONDS", "end", "start", "wait_for"]


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the server loads torch; two processes share two cores
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["klamp.lab.loop", "tests.training.children", "tests.reliability.kills"])
    child = context.Process(target=target, args=arguments, daemon=True)
    child.start()
    return child


def end(children: Sequence[BaseProcess]) -> list[int | None]:
    deadline = time.monotonic() + SECONDS
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    return codes
