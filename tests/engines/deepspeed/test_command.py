"""`klamp train --backend trl` on two processes under DeepSpeed: the numbers of plain data parallelism."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.deepspeed.test_stages import ENVIRONMENT
from tests.engines.programs import ROOT, said_by
from tests.training.conftest import stored, tiny_llama
from tests.training.in_trl.conftest import QUICK
from tests.training.in_trl.test_program import rows_of

from klamp.lab.folders import newest_policy
from klamp.lab.models import load_model

CHANGES: dict[str, Any] = {"prompts_per_step": 4, "gradient_accumulation_steps": 2, "loss_type": "dapo"}
CHANGES |= {"target_kl": 0.02, "kl_controller": "step", "eval_every": 2}  # an evaluation draws, in both runs


def trained(folder: Path, program: list[str], *more: str) -> None:
    values = {**QUICK, **CHANGES, "model": folder.parent / "model", "output_dir": folder, "report_to": "none"}
    values["lr_scheduler_type"] = "constant"  # that of a run of two steps is that of three
    flags = [f"--{name}={value}" for name, value in values.items() if name != "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", *program]
    said_by([*launch, "train", *flags, *more], ENVIRONMENT | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    stored(tiny_llama(), folder / "model")
    trained(folder / "run", ["klamp.cli"], "--cpu")
    return folder


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_stage_has_the_numbers_of_plain_data_parallelism_and_goes_on_with_them(folder: Path, stage: str) -> None:
    for more in ("--max_steps=2", "--resume"):
        trained(folder / stage, ["tests.engines.deepspeed.command", stage], more)
    plain, split = rows_of(folder / "run"), rows_of(folder / stage)
    assert len(split) == len(plain) == 3
    for row, wanted in zip(split, plain, strict=True):
        assert wanted.keys() - row.keys() <= ({"kl/exact"} if stage == "3" else set()), "no process has the whole head"
        assert row == {name: pytest.approx(wanted[name], rel=1e-5, abs=1e-5) for name in row}
    trained_by_one, whole = (load_model(str(newest_policy(folder / name))) for name in ("run", stage))
    for weight, wanted in zip(whole.parameters(), trained_by_one.parameters(), strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-5, rtol=1e-5)


def test_stage_2_in_bfloat16_as_prepare_prints_it(folder: Path) -> None:
    trained(folder / "bf16", ["tests.engines.deepspeed.command", "bf16"], "--max_steps=2")
    first, second = rows_of(folder / "bf16")
    assert abs(first["kl/k3"]) < 1e-6, "policy and reference are computed in the same data type"
    assert second["kl/k3"] > 0
