"""Rewards that get some runs into trouble: they kill their process, wait to be interrupted, or break."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

CALLS = {"count": 0}
BEFORE = 9 + 3 * 12
"""Calls before the fourth step: nine held-out prompts, and three steps of twelve completions."""


def digits(completion: str, **_: Any) -> float:
    """Share of digits among six characters."""
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
