"""Runs in processes of their own: a server imports the libraries once, and every child is a fork of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.ports import kept_port
from tests.waiting import SECONDS, wait_for

__all__ = ["SECONDS", "end", "free_ports", "join_group", "one_of_several", "paused_run", "start", "wait_for"]


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A child that calls the function, which must be importable."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the server loads torch; two processes share two cores
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["klamp.training.trainer", "tests.training.children", "tests.reliability.kills"])
    child = context.Process(target=target, args=arguments, daemon=True)
    child.start()
    return child


def end(children: Sequence[BaseProcess]) -> list[int | None]:
    """Exit codes of the children, once all have ended."""
    deadline = time.monotonic() + SECONDS
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    return codes


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, kept for whoever is told of them."""
    return [kept_port() for _ in range(count)]


def paused_run(values: dict[str, Any], step: int, here: str, on: str, told: str) -> None:
    """Train; after a step, say so in the file `here` and wait for the file `on`. An error goes to the file `told`."""
    import torch

    from klamp.errors import KlampError
    from klamp.training.backends import train_run
    from klamp.training.config import TrainConfig
    from klamp.training.observers import Observer

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


def join_group(rank: int, count: int, port: int) -> None:
    """Make this process one of a gloo group, as torchrun would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo asks for the host's name, which may take its time


def one_of_several(rank: int, count: int, ports: list[int], jobs: list[dict[str, Any]], told: str) -> None:
    """One process of a gloo group, as torchrun starts it; trains every job and notes how each one ended."""
    import torch
    from accelerate.state import AcceleratorState
    from tests.training import rewards
    from transformers.utils import logging

    from klamp.errors import KlampError
    from klamp.training.backends import train_run
    from klamp.training.config import TrainConfig

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    ends = []
    for port, job in zip(ports, map(dict, jobs), strict=True):
        join_group(rank, count, port)
        os.environ |= job.pop("environment", {})
        rewards.STATE.update(calls=0, break_at=job.pop("break_at", {}).get(rank, -1))
        try:
            train_run(TrainConfig.from_flat(job))
            ends.append("done")
        except KlampError as error:
            notes = getattr(error, "__notes__", "")
            ends.append(f"{type(error).__name__}: {error.what} {error.got} {error.why} {notes}")
        if torch.distributed.is_initialized():  # one that was refused has left its group to the end of its process
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)  # the next one joins another
    Path(told).write_text(json.dumps(ends), encoding="utf-8")
