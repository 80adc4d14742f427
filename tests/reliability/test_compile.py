"""Losses inside torch.compile have the values and gradients that they have outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_values_and_gradients_are_those_without_torch_compile(backend: str) -> None:
    words = [sys.executable, "-m", "tests.reliability.compiled", backend]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 13
    assert {name: each for name, each in found.items() if not (isinstance(each, float) and each < 1e-5)} == {}
