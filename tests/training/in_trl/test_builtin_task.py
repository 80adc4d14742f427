"""The built-in task is learned through every backend that has a place here; each ends about as far from the reference.

Ten seeds, by one thread and by two: addition 0.94 to 1.00, a skill that is kept 0.99 or more, an exact KL of 0.11 to
0.16 nats; TRL ends at 0.76 to 1.48 of that, a service at 0.43 to 1.61 (k3 on few samples).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.conftest import steps_of

from klamp.training.backends import train_run
from klamp.training.config import TrainConfig
from klamp.training.models import load_model, load_tokenizer

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"prompts_per_step": 16, "max_steps": 40, "learning_rate": 3e-4, "eval_size": 128}
SIZES |= {"eval_every": 0, "save_every": 0, "log_completions": 0, "report_to": ()}


def ended(folder: Any, **changes: Any) -> dict[str, float]:
    """The KLs of a run's last ten steps, once it can add and kept the rest."""
    config = TrainConfig.from_flat({**SIZES, "output_dir": str(folder), **changes})
    summary = train_run(config)
    assert summary.before["addition"] < 0.8, "0.77"
    assert summary.after["addition"] > 0.85
    assert min(summary.after.values()) >= 0.85
    last = steps_of(folder)[-10:]
    return {name: sum(row[name] for row in last) / 10 for name in ("kl/exact", "kl/k3") if name in last[0]}


def test_every_loop_learns_it_and_ends_as_far_away(default_base_model, tmp_path):
    here = ended(tmp_path / "local", backend="local", cpu=True)
    by_trl = ended(tmp_path / "trl", backend="trl", cpu=True)
    assert all(1 / 4 < by_trl[name] / here[name] < 4 for name in ("kl/exact", "kl/k3"))
    assert 0.02 < here["kl/exact"] < 0.6


def test_a_service_learns_it_with_an_adapter(default_base_model, tmp_path, monkeypatch):
    """As far away as `local` ends with the same adapter, k3 for k3: the service tells no exact KL."""
    pytest.importorskip("tinker")
    from klamp.tinker.testing import serve

    adapter = {"lora_r": 32, "learning_rate": 1.5e-3, "warmup_steps": 2, "prompts_per_step": 12, "max_steps": 25}
    here = ended(tmp_path / "local", backend="local", cpu=True, **adapter)
    with serve(load_model("builtin"), load_tokenizer("builtin"), name="klamp/builtin") as standin:
        for name, value in standin.environment.items():
            monkeypatch.setenv(name, value)
        there = ended(tmp_path / "tinker", backend="tinker", model="klamp/builtin", **adapter)
    assert 1 / 8 < there["kl/k3"] / here["kl/k3"] < 8
