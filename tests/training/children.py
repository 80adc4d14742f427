"""Runs in processes of their own: a server imports the libraries once, and every child is a fork of it."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.waiting import SECONDS, wait_for

__all__ = ["SECONDS", "end", "paused_run", "start", "wait_for"]


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


def paused_run(values: dict[str, Any], step: int, here: str, on: str, told: str) -> None:
    """Train; after a step, say so in the file `here` and wait for the file `on`. An error goes to the file `told`."""
    import torch

    from klamp.errors import KlampError
    from klamp.lab.backends import train_run
    from klamp.lab.config import TrainConfig
    from klamp.lab.observers import Observer

    class Pause(Observer):
        def on_step(self, done: int, metrics: object) -> None:
            if done == step:
                Path(here).touch()
                wait_for(Path(on))

    torch.set_num_threads(1)
    try:
        train_run(TrainConfig.from_flat(values), [Pause()])
    except KlampError as error:
        Path(told).write_text(f"{type(error).__name__}\n{error}", encoding="utf-8")
        sys.exit(130)
