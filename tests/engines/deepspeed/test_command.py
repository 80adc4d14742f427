"""`klamp train --backend trl` on two processes under DeepSpeed: the numbers of plain data parallelism."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.engines.deepspeed.test_stages import ENVIRONMENT
from tests.engines.programs import ROOT, said_by
from tests.training.conftest import steps_of, stored, tiny_llama
from tests.training.in_trl.conftest import QUICK
from tests.training.in_trl.test_processes import CHANGES


def trained(folder: Path, program: list[str], *more: str) -> None:
    values = {**QUICK, **CHANGES, "model": folder.parent / "model", "output_dir": folder, "report_to": "none"}
    values["lr_scheduler_type"] = "constant"  # that of a run of two steps is that of three
    flags = [f"--{name}={value}" for name, value in values.items() if name != "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", *program]
    said_by([*launch, "train", *flags, *more], ENVIRONMENT | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"})


def test_stage_two_has_the_numbers_of_plain_data_parallelism_and_goes_on_with_them(tmp_path: Path) -> None:
    stored(tiny_llama(), tmp_path / "model")
    trained(tmp_path / "plain", ["klamp.cli"], "--cpu")
    for more in ("--max_steps=2", "--resume"):
        trained(tmp_path / "split", ["tests.engines.deepspeed.command", "2"], more)
    plain, split = steps_of(tmp_path / "plain"), steps_of(tmp_path / "split")
    assert len(split) == len(plain) == 3
    for row, wanted in zip(split, plain, strict=True):
        assert row == {name: pytest.approx(wanted[name], rel=1e-5, abs=1e-5) for name in wanted}
