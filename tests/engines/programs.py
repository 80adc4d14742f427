"""Programs that may hang, each in a session of its own under a hard time limit."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 390
"""Seconds after which a program and all that it started are killed."""


def said_by(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """What a program prints, from the repository's root; an AssertionError if it fails or takes too long."""
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = running.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        said, _ = running.communicate()
        raise AssertionError(f"{' '.join(command)} took more than {LIMIT} s:\n{said[-3000:]}") from None
    assert running.returncode == 0, said[-3000:]
    return said
