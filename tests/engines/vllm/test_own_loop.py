"""klamp's own loop with a real vLLM in its process: the policy's probabilities at every step, whatever is trained.

On the processor that is here, and as on one with AMX, where vLLM has one more way to pack weights (see `amx.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.programs import ASKED, result_of
from tests.engines.vllm.test_training import SIZES

HERE = Path(__file__).parent

OWN = {**SIZES, "sampler": "vllm", "cpu": True, "report_to": []}
ROUGH = {**OWN, "dtype": "bfloat16"}
RUNS = {
    "seen": {**OWN, "packs": "seen"},  # these first, since what packs is switched off for a whole process
    "unseen": {**OWN, "packs": "unseen"},
    "whole": OWN,
    "in parts": {**OWN, "stop": 3},
    "adapter": {**OWN, "lora_r": 4, "learning_rate": 5e-3},
    "cool": {**OWN, "temperature": 0.6},
    "rough": ROUGH,
}
ON_AMX = {"seen": {**ROUGH, "packs": "seen"}, "rough": ROUGH}


@pytest.fixture(scope="module")
def found(default_base_model: Path) -> dict[str, Any]:
    """What all runs logged, one after the other in one process."""
    return result_of(HERE / "own_loop.py", json.dumps(RUNS))


@pytest.fixture(scope="module")
def on_amx(default_base_model: Path) -> dict[str, Any]:
    """What runs in bfloat16 logged where the processor has AMX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ASKED, "1")
        return result_of(HERE / "own_loop.py", json.dumps(ON_AMX))


def run(found: dict[str, Any], name: str) -> dict[str, Any]:
    """A run that came to its last step."""
    assert "error" not in found[name], found[name]["error"]
    return found[name]


@pytest.mark.parametrize("name", ["whole", "adapter", "cool"])
def test_vllm_follows_the_policy(found: dict[str, Any], name: str) -> None:
    rows, differences = run(found, name)["rows"], run(found, name)["differences"]
    assert len(rows) == len(differences) == 5
    assert max(differences) < 1e-4
    assert rows[0]["kl/k3"] < 1e-9
    assert rows[-1]["kl/k3"] > 0.05, "the policy has moved, and vLLM with it"
    assert all(abs(row["sampler/k1"]) < 1e-5 and row["sampler/k3"] < 1e-9 for row in rows)


def test_a_run_that_goes_on_is_the_uninterrupted_one(found: dict[str, Any]) -> None:
    assert run(found, "in parts")["rows"] == run(found, "whole")["rows"]


@pytest.mark.parametrize("processor", ["found", "on_amx"])
def test_half_the_bits_are_a_mismatch_that_is_logged(request: pytest.FixtureRequest, processor: str) -> None:
    rows = run(request.getfixturevalue(processor), "rough")["rows"]
    assert all(0 < row["sampler/k3"] < 1e-2 for row in rows)
    assert rows[0]["kl/k3"] < 1e-9, "the KL is that of the policy itself"


def test_packed_weights_are_found_out_before_the_first_step(found: dict[str, Any]) -> None:
    assert "vLLM does not have the policy's weights" in found["unseen"]["error"]


@pytest.mark.parametrize(("processor", "kernels"), [("found", "oneDNN"), ("on_amx", "oneDNN and a kernel for AMX")])
def test_a_vllm_that_packs_is_refused_before_it_is_made(
    request: pytest.FixtureRequest, processor: str, kernels: str
) -> None:
    error = request.getfixturevalue(processor)["seen"]["error"]
    assert error.startswith(f"vLLM packs the model's weights on this CPU\n  got: {kernels}, for torch.")
