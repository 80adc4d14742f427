"""Two real processes over gloo: one run, one set of metrics, TRL's loss is klamp's over both; sharded they stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import rows_of, steps_of
from tests.training.in_trl.conftest import QUICK

from klamp.core.advantages import group_advantages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CHANGES: dict[str, Any] = {"prompts_per_step": 4, "gradient_accumulation_steps": 2, "loss_type": "dapo"}
CHANGES |= {"target_kl": 0.02, "kl_controller": "step", "log_completions": 16, "log_completions_every": 1}
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
SHARDED |= {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
PARTS = ("train/policy_loss", "train/kl_penalty", "train/teacher_penalty")
KLAMP = ["-m", "klamp.cli"]


def launched(models: tuple[str, str], folder: Path, program: list[str], environment: dict[str, str], more: str) -> Path:
    """A run on two processes, begun or continued."""
    values = {**QUICK, **CHANGES, "output_dir": str(folder), "report_to": "none"}
    values |= {"model": models[0], "teacher_model": models[1], "teacher_estimator": "k3", "teacher_coef": 0.1}
    flags = [f"--{name}={value}" for name, value in values.items() if name != "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program]
    around = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, "train", *flags, "--cpu", more]
    done = subprocess.run(
        command, env=os.environ | around | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "2 processes" in done.stdout
    return folder


@pytest.fixture(scope="module")
def models(llama: str, teacher: str) -> tuple[str, str]:
    """The folders of policy and teacher."""
    return llama, teacher


@pytest.fixture(scope="module")
def two_steps(models, tmp_path_factory) -> Path:
    return launched(models, tmp_path_factory.mktemp("begun") / "run", KLAMP, {}, "--max_steps=2")


@pytest.fixture(scope="module")
def run(models, two_steps, tmp_path_factory) -> Path:
    """The run of two steps, continued to a third in a copy of its folder."""
    folder = shutil.copytree(two_steps, tmp_path_factory.mktemp("continued") / "run")
    return launched(models, folder, KLAMP, {}, "--resume")


def test_sharded_by_fsdp2_it_has_the_same_numbers(run, models, tmp_path):
    """With one prompt of each skill one process has nothing to answer, and must not wait for the other's weights."""
    program = [str(ROOT / "examples/accelerate/fsdp2_on_cpu.py"), str(ROOT / "src/klamp/cli/__main__.py")]
    for more in ("--max_steps=2", "--resume"):
        launched(models, tmp_path / "run", program, SHARDED, more)
    plain, sharded = rows_of(run), rows_of(tmp_path / "run")
    assert [row["step"] for row in sharded] == [row["step"] for row in plain]
    for row, wanted in zip(sharded, plain, strict=True):
        assert wanted.keys() - row.keys() <= {"kl/exact"}, "no process has the whole output head"
        assert row == {name: pytest.approx(wanted[name], abs=1e-5) for name in row}


@pytest.mark.gate
def test_the_loss_is_klamp_s_over_both(two_steps):
    rows = steps_of(two_steps)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train/loss"] == pytest.approx(sum(row[name] for name in PARTS), abs=1e-6)
        assert row["teacher/kl"] > 0.01
    assert rows[0]["kl/k3"] < 1e-6 < rows[1]["kl/k3"]


def test_a_second_start_goes_on(run):
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["train/loss"] == pytest.approx(sum(rows[2][name] for name in PARTS), abs=1e-6)
    assert rows[2]["beta"] == pytest.approx(1.5 * rows[1]["beta"]), "the controller went on after the second start"
    assert [row["step"] for row in rows_of(run) if "eval/addition" in row] == [0, 2, 3]


@pytest.mark.gate
def test_groups_and_evaluations_are_those_of_all(two_steps):
    lines = [json.loads(line) for line in (two_steps / "completions.jsonl").read_text().splitlines()]
    shown = [line for line in lines if line["step"] == 2]
    assert len(shown) == 8, "those of the main process"
    rewards = torch.tensor([line["reward"] for line in shown])
    wanted = group_advantages(rewards, 4, scale="std", baseline="leave_one_out")
    assert [line["advantage"] for line in shown] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert [row["step"] for row in rows_of(two_steps) if "eval/addition" in row] == [0, 2]
