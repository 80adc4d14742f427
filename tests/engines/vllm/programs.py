"""Programs around a real vLLM, each run by itself: an engine takes processes of its own, and may hang."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.programs import ROOT, said_by

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT}/src:{ROOT}",
}
"""vLLM on one core of a CPU, without a network; its workers find the tests."""


def result_of(program: Path, *words: str) -> Any:
    """The JSON object in the last line that a program prints; an AssertionError if it fails or takes too long."""
    said = said_by([sys.executable, str(program), *words], ENVIRONMENT)
    found = [line for line in said.splitlines() if line.startswith("{")]
    assert found, said[-3000:]
    return json.loads(found[-1])
