"""klamp's own loop with a real vLLM in its process: the policy's probabilities at every step, whatever is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.programs import result_of
from tests.engines.vllm.test_training import SIZES

HERE = Path(__file__).parent

OWN = {**SIZES, "sampler": "vllm", "cpu": True, "report_to": []}
RUNS = {
    "packed": {**OWN, "pack": True},  # first, since what packs is switched off for a whole process
    "whole": OWN,
    "in parts": {**OWN, "stop": 3},
    "adapter": {**OWN, "lora_r": 4, "learning_rate": 5e-3},
    "cool": {**OWN, "temperature": 0.6},
    "rough": {**OWN, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def found(default_base_model: Path) -> dict[str, Any]:
    """What all runs logged, one after the other in one process."""
    return result_of(HERE / "own_loop.py", json.dumps(RUNS))


@pytest.mark.parametrize("name", ["whole", "adapter", "cool"])
def test_vllm_follows_the_policy(found: dict[str, Any], name: str) -> None:
    rows, differences = found[name]["rows"], found[name]["differences"]
    assert len(rows) == len(differences) == 5
    assert max(differences) < 1e-4
    assert rows[0]["kl/k3"] < 1e-9
    assert rows[-1]["kl/k3"] > 0.05, "the policy has moved, and vLLM with it"
    assert all(abs(row["sampler/k1"]) < 1e-5 and row["sampler/k3"] < 1e-9 for row in rows)


def test_a_run_that_goes_on_is_the_uninterrupted_one(found: dict[str, Any]) -> None:
    assert found["in parts"]["rows"] == found["whole"]["rows"]


def test_half_the_bits_are_a_mismatch_that_is_logged(found: dict[str, Any]) -> None:
    rows = found["rough"]["rows"]
    assert all(1e-7 < row["sampler/k3"] < 1e-2 for row in rows)
    assert rows[0]["kl/k3"] < 1e-9, "the KL is that of the policy itself"


def test_packed_weights_are_found_out_before_the_first_step(found: dict[str, Any]) -> None:
    assert "vLLM does not have the policy's weights" in found["packed"]["error"]
