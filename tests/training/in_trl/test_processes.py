"""Two real processes over gloo: one run, one set of metrics, and TRL's loss is klamp's over all of the completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import rows_of, steps_of
from tests.training.in_trl.conftest import QUICK

from klamp.core.advantages import group_advantages

ROOT = Path(__file__).resolve().parents[3]
CHANGES: dict[str, Any] = {"prompts_per_step": 4, "gradient_accumulation_steps": 2, "loss_type": "dapo"}
CHANGES |= {"target_kl": 0.02, "kl_controller": "step", "log_completions": 16, "log_completions_every": 1}


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes") / "run"
    values = {**QUICK, **CHANGES, "model": llama, "output_dir": str(folder), "report_to": "none"}
    flags = [f"--{name}={value}" for name, value in values.items() if name != "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "klamp.cli"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    for more in (["--max_steps=2"], ["--resume"]):
        command = [*launch, "train", *flags, "--cpu", *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "2 processes" in done.stdout
    return folder


@pytest.mark.slow
def test_the_loss_is_klamp_s_over_both(run):
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/loss"] == pytest.approx(row["train/policy_loss"] + row["train/kl_penalty"], abs=1e-6)
    assert rows[0]["kl/k3"] < 1e-6 < rows[1]["kl/k3"]
    assert rows[2]["beta"] == pytest.approx(1.5 * rows[1]["beta"]), "the controller went on after the second start"


@pytest.mark.slow
def test_groups_and_evaluations_are_those_of_all(run):
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    shown = [line for line in lines if line["step"] == 2]
    assert len(shown) == 8, "those of the main process"
    rewards = torch.tensor([line["reward"] for line in shown])
    wanted = group_advantages(rewards, 4, scale="std", baseline="leave_one_out")
    assert [line["advantage"] for line in shown] == pytest.approx(wanted.tolist(), abs=1e-5)
    evaluated = [row for row in rows_of(run) if "eval/addition" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 3]
