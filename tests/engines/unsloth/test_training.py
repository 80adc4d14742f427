"""Short real runs of Unsloth's trainer with klamp's KL."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from tests.engines.unsloth.hosts import attached

from klamp.config import KLConfig

STEPS = 30


def many_of_a_letter(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("e")) for text in completions]


def run(folder: Path, beta: float, **options: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    host = attached(
        folder,
        KLConfig(beta=beta, kl_monitor=True, **options),
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[str, list[float]]]:
    return {beta: run(tmp_path_factory.mktemp(f"beta-{beta}"), beta) for beta in (0.0, 0.01, 3.0)}


def test_a_large_beta_holds_the_kl_and_a_small_one_lets_it_drift(runs: dict[float, dict[str, list[float]]]) -> None:
    late = {beta: mean(found["kl/k3"][-5:]) for beta, found in runs.items()}
    assert late[3.0] < 0.25 * late[0.01]
    assert late[0.01] > 3 * mean(runs[0.01]["kl/k3"][1:6])
    assert late[0.0] > 0.5 * late[0.01]


def test_the_reward_rises_where_the_kl_lets_it(runs: dict[float, dict[str, list[float]]]) -> None:
    rise = {beta: mean(found["reward"][-5:]) - mean(found["reward"][:5]) for beta, found in runs.items()}
    assert rise[0.01] > rise[3.0]
    assert rise[0.0] > rise[3.0]


def test_a_controller_turns_a_small_beta_into_one_that_holds(
    tmp_path: Path, runs: dict[float, dict[str, list[float]]]
) -> None:
    held = run(tmp_path, 0.01, target_kl=0.01)
    assert held["beta"][-1] > 10 * held["beta"][0]
    assert mean(held["kl/k3"][-5:]) < 0.5 * mean(runs[0.01]["kl/k3"][-5:])
