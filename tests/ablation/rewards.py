"""Rewards that get some runs into trouble: they kill their process, wait to be interrupted, or break."""

import os
import signal
import time
from pathlib import Path
from typing import Any

FOLDER = "KLAMP_TEST_FOLDER"
"""Environment variable: the folder in which they look for each other's marks."""
SECONDS = 240
"""After which they wait no more."""
STATE = {"calls": 0}
"""Calls of `kills_once` in this process."""
KILL_AT = 3 * 2 + 12 + 12 + 5
"""Three skills of two held-out prompts, two steps of twelve completions, and some of the third step."""


def digits(completion: str, **_: Any) -> float:
    """Share of digits among six characters; a worker of a cluster knows no other file of the tests."""
    return sum(c.isdigit() for c in completion) / 6


def kills_once(completion: str, **_: Any) -> float:
    """`digits`; kills its process in the third step, the first time it gets there."""
    STATE["calls"] += 1
    mark = Path(os.environ[FOLDER]) / "killed"
    if STATE["calls"] == KILL_AT and not mark.exists():
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(completion)


def breaks(completion: str, **_: Any) -> float:
    with (Path(os.environ[FOLDER]) / "breaks").open("a") as file:
        file.write("once\n")
    raise RuntimeError("the judge is out to lunch")


def waits(completion: str, **_: Any) -> float:
    """`digits`; in the second step waits until somebody interrupts the run, once."""
    here = Path(os.environ[FOLDER])
    if not (here / "interrupted").exists() and (here / "runs/stopped_seed-2/checkpoints/step-000001").exists():
        (here / "waiting").touch()
        end = time.monotonic() + SECONDS
        while not getattr(signal.getsignal(signal.SIGINT), "asked", False) and time.monotonic() < end:
            time.sleep(0.02)
        (here / "interrupted").touch()
    return digits(completion)
