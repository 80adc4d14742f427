"""Waits for what another process or thread does: no test passes or fails by how long one takes.

`SECONDS` is there to end a hang, before pytest's own limit for a test does, and says nothing of how fast anything is.
"""

import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 240.0
"""The longest wait for what is bound to come."""


def wait_until(ready: Callable[[], object]) -> None:
    """Return once something is so, or raise a TimeoutError."""
    deadline = time.monotonic() + SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {SECONDS:g} s: {ready}")
        time.sleep(0.02)


def wait_for(file: Path) -> None:
    """Return once another process has written a file, or raise a TimeoutError."""
    wait_until(file.exists)
