"""The Triton kernels: against float64 through the interpreter, compiled for GPUs, and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.core.heads import triton_cases

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


def run(mode: str, **environment: str) -> dict:
    """What a fresh process found."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.core.heads.triton_cases", mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> dict:
    return run("interpreter", TRITON_INTERPRET="1")


def assert_right(found: dict) -> None:
    assert found
    assert {name: pair for name, pair in found.items() if not pair[0] <= pair[1]} == {}


@pytest.mark.parametrize("name", triton_cases.cases("interpreter"))
def test_values_entropies_and_gradients(interpreted, name):
    assert set(interpreted[name]) >= {"value", "entropy", "hidden", "weight"}
    assert_right(interpreted[name])


@pytest.mark.parametrize("name", triton_cases.GROUPS)
def test_contract(interpreted, name):
    assert_right(interpreted[name])


def test_the_kernels_compile_and_fit_into_shared_memory(tmp_path):
    found = run("compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == len(triton_cases.COMPILED)
    for kernels in found.values():
        assert len(kernels) == 2
        assert_right(kernels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    found = run("cuda")
    assert set(found) == {*triton_cases.cases("cuda"), *triton_cases.GROUPS}
    for group in found.values():
        assert_right(group)


def test_a_cpu_never_meets_triton():
    code = """
import sys, torch, klamp
hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
klamp.linear_logprobs(hidden, weight, torch.arange(3)).sum().backward()
print("triton" in sys.modules, "klamp.core.heads._triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
