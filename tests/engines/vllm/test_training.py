"""A run by TRL whose completions a real vLLM writes: its weights are those of the policy at every step."""

from __future__ import annotations

from pathlib import Path

from tests.engines.vllm.programs import result_of

HERE = Path(__file__).parent

SIZES = {
    "prompts_per_step": 4,
    "max_completion_length": 8,
    "max_steps": 5,
    "learning_rate": 5e-4,
    "warmup_steps": 0,
    "beta": 0.02,
    "kl_off_policy": "token",
    "eval_size": 4,
    "eval_every": 0,
    "train_size": 64,
    "log_completions": 32,
    "log_completions_every": 1,
    "report_to": "none",
}


def test_vllm_follows_the_policy(default_base_model: Path) -> None:
    flags = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    found = result_of(HERE / "training.py", *flags, "--cpu")
    assert found["status"] == 0
    assert len(found["rows"]) == len(found["differences"]) == 5
    assert max(found["differences"]) < 1e-5
    assert found["rows"][0]["kl/k3"] < 1e-9
    assert found["rows"][-1]["kl/k3"] > 0.05, "the policy has moved, and vLLM with it"
    assert all(abs(row["sampler/k1"]) < 1e-5 for row in found["rows"])
