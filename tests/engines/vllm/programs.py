"""Programs around a real vLLM, each run by itself: an engine takes processes of its own, and may hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""vLLM on one core of a CPU, without a network."""
LIMIT = 390
"""Seconds after which a program and all that it started are killed."""


def result_of(program: Path, *words: str) -> Any:
    """The JSON object in the last line that a program prints.

    Raises:
        AssertionError: it fails, or takes too long; with the end of what it said.
    """
    command = [sys.executable, str(program), *words]
    running = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT},
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
        raise AssertionError(f"{program.name} took more than {LIMIT} s:\n{said[-3000:]}") from None
    assert running.returncode == 0, said[-3000:]
    found = [line for line in said.splitlines() if line.startswith("{")]
    assert found, said[-3000:]
    return json.loads(found[-1])
