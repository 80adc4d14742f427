"""Rewards that get some runs into trouble: they kill their process, wait to be interrupted, or break."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

CALLS = {"count": 0}
BEFORE = 9 + 3 * 12
"""Calls before the fourth step: nine held-out prompts, and three steps of twelve completions."""


def digits(completion: str, **_: Any) -> float:
    """Share of digits among six characters; a worker of a cluster knows no other file of the tests."""
    return sum(c.isdigit() for c in completion) / 6


def digits_or_trouble(completion: str, **_: Any) -> float:
    """Share of digits; a run that the environment names is killed in its fourth step, or its reward raises there, or
    it waits for a file in its third."""
    CALLS["count"] += 1
    trouble = json.loads(os.environ.get("KLAMP_TEST_TROUBLE", "{}"))
    mine = trouble.get(_run_name())
    if mine == "wait" and CALLS["count"] > 9 + 2 * 12:
        from tests.waiting import wait_for

        wait_for(Path(trouble["until"]))
    if mine == "kill" and CALLS["count"] > BEFORE + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == "raise" and CALLS["count"] > BEFORE + 2:
        raise RuntimeError("the judge is out to lunch")
    return digits(completion)


def _run_name() -> str:
    """The run of this worker, from its command line; another word in the process of the tests."""
    words = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
    return next((Path(word).name for word in words if "_seed-" in Path(word).name), "")


FOLDER = "KLAMP_TEST_FOLDER"
"""Environment variable: the folder in which they look for each other's marks."""
SECONDS = 240
"""After which they wait no more."""


STATE = {"calls": 0}
"""Calls of `kills_once` in this process."""
KILL_AT = 3 * 2 + 12 + 12 + 5
"""Three skills of two held-out prompts, two steps of twelve completions, and some of the third step."""


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
