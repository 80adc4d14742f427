"""Short real runs of Unsloth's trainer with klamp's KL, and the benchmark of its step."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tests.engines.unsloth.hosts import attached

from benchmarks.measure import isolated
from benchmarks.step_runs import Setting, write_setting
from klamp.config import KLConfig

STEPS = 30


def many_of_a_letter(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("e")) for text in completions]


def run(folder: Path, beta: float, **options: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    host = attached(
        folder,
        KLConfig(beta=beta, **options),
        reward=many_of_a_letter,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_steps=STEPS,
        num_generations=8,
        per_device_train_batch_size=16,
    )
    host.train()
    steps = [entry for entry in host.state.log_history if "kl/k3" in entry]
    assert len(steps) == STEPS
    return {name: [entry[name] for entry in steps] for name in ("kl/k3", "beta", "reward")}


def test_a_small_beta_lets_it_learn_and_drift_and_a_controller_makes_it_hold(tmp_path: Path) -> None:
    free, held = run(tmp_path / "free", 0.01), run(tmp_path / "held", 0.01, target_kl=0.01)
    assert mean(free["reward"][-5:]) > mean(free["reward"][:5])
    assert mean(free["kl/k3"][-5:]) > 3 * mean(free["kl/k3"][1:6])
    assert held["beta"][-1] > 10 * held["beta"][0]
    assert mean(held["kl/k3"][-5:]) < 0.5 * mean(free["kl/k3"][-5:])


def test_its_trainer_takes_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    model, prompts = write_setting(tmp_path, "tiny", 8)
    setting = Setting(trainer="unsloth", model=model, prompts=prompts, completion=8, steps=2, warmup=1)
    found = isolated("benchmarks.step_runs:one", {"setting": setting.to_dict()}, threads=1)
    assert len(found["seconds"]) == 1 and found["tokens"] == 2 * 8 * 8
