"""FSDP1, and an FSDP that accelerate drops, are refused under TRL; two real processes are in test_processes.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from klamp.errors import ConfigError
from klamp.training.backends import train_run
from klamp.training.in_trl.run import check_split, gathered


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")


@pytest.mark.parametrize("version", ["1", None])
def test_fsdp1_is_refused_before_any_work(quick, tmp_path, asked, monkeypatch, version):
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    if version:
        monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(ConfigError, match="FSDP1") as caught:
        train_run(quick())
    assert "--fsdp_version 2" in caught.value.fix and not (tmp_path / "run").exists()


def test_fsdp_that_accelerate_drops_on_cpus_is_refused(quick, asked, monkeypatch):
    accelerator: Any = SimpleNamespace(
        num_processes=2,
        distributed_type=DistributedType.MULTI_CPU,
        device=torch.device("cpu"),
        state=SimpleNamespace(deepspeed_plugin=None),
    )
    with pytest.raises(ConfigError, match="accelerate does not use it here") as caught:
        check_split(quick(), accelerator)
    assert caught.value.got == "2 processes on cpu"
    accelerator.num_processes = 1
    check_split(quick(), accelerator)  # its weights are whole either way
    accelerator.num_processes, accelerator.distributed_type = 2, DistributedType.FSDP
    check_split(quick(), accelerator)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    accelerator.distributed_type = DistributedType.MULTI_CPU
    check_split(quick(), accelerator)


def test_whole_weights_are_left_as_they_are():
    module = torch.nn.Linear(2, 2)
    before = module.weight
    with gathered(module, split_after_passes=True):
        assert module.weight is before
