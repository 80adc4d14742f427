"""Runs by TRL whose completions a real vLLM writes: its weights are those of the policy at every step."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.programs import result_of
from tests.engines.vllm.servers import vllm_server
from tests.engines.vllm.weights import FLAGS

HERE = Path(__file__).parent

SAME = 1e-4
"""How far two float32 kernels may be apart in the log-probability of one token of the built-in model.

Its logits are about 20, where 30 eps are 7e-5. Old weights would show: an update moves some token by 0.1 nats and more.
"""

SIZES = {"prompts_per_step": 4, "max_completion_length": 8, "max_steps": 5, "train_size": 64, "eval_size": 4}
SIZES |= {"learning_rate": 5e-4, "warmup_steps": 0, "beta": 0.02, "kl_off_policy": "token", "eval_every": 0}
SIZES |= {"log_completions": 32, "log_completions_every": 1, "report_to": "none"}


def ran(**changes: Any) -> Any:
    flags = [word for name, value in (SIZES | changes).items() for word in (f"--{name}", str(value))]
    found = result_of(HERE / "training.py", *flags, "--cpu")
    assert found["status"] == 0
    updates = (SIZES | changes)["max_steps"] * changes.get("num_iterations", 1)
    assert len(found["rows"]) == len(found["differences"]) == updates
    return found


def assert_vllm_follows(found: Any) -> None:
    assert max(found["differences"]) < SAME
    assert found["rows"][0]["kl/k3"] < 1e-9
    assert found["rows"][-1]["kl/k3"] > 1e-3, "the policy has moved by far more than the bound, and vLLM with it"
    assert all(row["sampler/abs"] < SAME for row in found["rows"])


@pytest.mark.gate
def test_vllm_follows_the_policy(default_base_model: Path) -> None:
    assert_vllm_follows(ran(sampler="vllm"))


def test_a_server_follows_the_policy(default_base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "new.safetensors"))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # as `trl vllm-serve` does: new weights are taken
    with vllm_server(default_base_model, tmp_path / "server.log", "--max-model-len", "32", *FLAGS) as url:
        found = ran(sampler_url=url, teacher_model=default_base_model, teacher_estimator="exact", teacher_coef=0.05)
    assert_vllm_follows(found)
    course = [row["teacher/kl"] for row in found["rows"]]
    assert course[0] < 1e-6 < 1e-3 < course[-1], "the teacher is the model that training started from"


def test_bfloat16_and_two_updates_per_rollout(default_base_model: Path) -> None:
    """vLLM's numbers differ by bfloat16's rounding, and the second update has moved on: the weights bound both."""
    found = ran(sampler="vllm", dtype="bfloat16", num_iterations=2, kl_max_weight=1.05, max_steps=3)
    first, *others = found["rows"]
    assert 1e-5 < max(found["differences"][::2]) < 0.5, "of the first update after each rollout"
    assert all(math.isfinite(row["kl/k3"]) for row in found["rows"])
    assert abs(first["kl/k3"]) < 1e-2 < others[-1]["kl/k3"]
    assert any(row["kl/weights_truncated"] > 0 for row in found["rows"])


@pytest.mark.gate
def test_fast_scoring_has_trls_numbers_of_vllms_completions(default_base_model: Path) -> None:
    found = result_of(HERE / "fast.py", str(default_base_model))
    assert found["in force"].startswith("completions are scored by klamp: each distinct prompt once")
    assert found["told"] == [], "nothing was left to TRL"
    for name, size in {"loss": 4, "gradient": 4, "old": 2, "reference": 2}.items():
        bound = 0.1 * SAME if name == "loss" else SAME  # a mean over tokens
        assert len(found["apart"][name]) == size and max(found["apart"][name]) < bound, name
    assert max(found["apart"]["engine"]) < SAME, "vLLM follows the policy"
    assert max(found["apart"]["ratio"]) < SAME, "so that TRL's correction is 1"
    assert found["kl"][0] < 1e-6 < 1e-3 < found["kl"][-1], "the policy has moved"
