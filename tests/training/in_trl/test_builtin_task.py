"""The built-in task is learned by TRL as by klamp's own loop, and ends as far from the reference."""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.conftest import steps_of

from klamp.training import trainer
from klamp.training.config import TrainConfig
from klamp.training.in_trl import train

SIZES: dict[str, Any] = {"prompts_per_step": 16, "max_steps": 40, "learning_rate": 3e-4, "eval_size": 128}
SIZES |= {"eval_every": 0, "save_every": 0, "log_completions": 0, "report_to": (), "cpu": True}


@pytest.mark.slow
def test_both_loops_learn_it_and_end_as_far_away(default_base_model, tmp_path):
    ends = {}
    for backend, run in (("local", trainer.train_run), ("trl", train.train_run)):
        folder = tmp_path / backend
        summary = run(TrainConfig.from_flat({**SIZES, "backend": backend, "output_dir": str(folder)}))
        assert summary.before["addition"] < 0.85
        assert summary.after["addition"] >= 0.98
        assert min(summary.after.values()) >= 0.95
        ends[backend] = sum(row["kl/exact"] for row in steps_of(folder)[-10:]) / 10
    assert ends["trl"] == pytest.approx(ends["local"], rel=0.4)
    assert 0.05 < ends["local"] < 0.3
