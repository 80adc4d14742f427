"""What klamp cannot use of FSDP is refused; training under it is tested in test_sharded_processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin

from klamp.errors import ConfigError
from klamp.training import setup
from klamp.training.sharding import check_fsdp, unusable_options


@pytest.fixture
def asked(monkeypatch):
    """What klamp looks at of an accelerator under an FSDP that is configured as `accelerate launch` does it."""
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.delenv(name, raising=False)

    def make(kind=DistributedType.FSDP, precision="no", backend="NO", **environment: str):
        for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **environment}.items():
            monkeypatch.setenv(name, value)
        return SimpleNamespace(
            num_processes=2,
            distributed_type=kind,
            device=torch.device("cpu"),
            mixed_precision=precision,
            parallelism_config=None,
            state=SimpleNamespace(
                fsdp_plugin=FullyShardedDataParallelPlugin(),
                dynamo_plugin=SimpleNamespace(backend=DynamoBackend(backend)),
            ),
        )

    return make


def test_plain_fsdp2_is_taken(asked):
    check_fsdp(asked(FSDP_AUTO_WRAP_POLICY="NO_WRAP", FSDP_CPU_RAM_EFFICIENT_LOADING="false"))


@pytest.mark.parametrize(
    ("environment", "given", "instead"),
    [
        (
            {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
            "fsdp_auto_wrap_policy transformer_auto_wrap_policy",
            "--fsdp_auto_wrap_policy NO_WRAP",
        ),
        (
            {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "fsdp_cpu_ram_efficient_loading true",
            "--fsdp_cpu_ram_efficient_loading false",
        ),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params true", "--fsdp_offload_params false"),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "fsdp_activation_checkpointing true",
            "gradient_checkpointing of klamp",
        ),
        ({"backend": "INDUCTOR"}, "dynamo_backend inductor", "--dynamo_backend no"),
        ({"precision": "bf16"}, "mixed_precision bf16", "--mixed_precision no and the dtype of klamp"),
    ],
)
def test_what_would_be_passed_over_is_refused(asked, environment, given, instead):
    accelerator = asked(**environment)
    assert unusable_options(accelerator) == {given: instead}
    with pytest.raises(ConfigError, match="does not run under FSDP set up so") as caught:
        check_fsdp(accelerator)
    assert caught.value.got == given and instead in caught.value.fix and "klamp.trl" in caught.value.fix


def test_fsdp_that_accelerate_drops_on_cpus_is_refused(asked, config_of, monkeypatch):
    accelerator = asked(DistributedType.MULTI_CPU)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(setup, "Accelerator", lambda **_: SimpleNamespace(**vars(accelerator), log_with=[]))
    with pytest.raises(ConfigError, match="accelerate does not use it here") as caught:
        setup.make_accelerator(config_of(prompts_per_step=4), Path())
    assert caught.value.got == "2 processes on cpu"
    accelerator.num_processes = 1
    check_fsdp(accelerator)


@pytest.mark.parametrize(("version", "backend"), [("1", "local"), (None, "local"), (None, "trl")])
def test_fsdp1_is_refused_before_accelerate_sets_it_up(config_of, monkeypatch, version, backend):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    if version:
        monkeypatch.setenv("FSDP_VERSION", version)
    monkeypatch.setattr(setup, "Accelerator", lambda **_: pytest.fail("too late"))
    with pytest.raises(ConfigError, match="FSDP1") as caught:
        setup.make_accelerator(config_of(backend=backend), Path())
    assert "--fsdp_version 2 --fsdp_auto_wrap_policy NO_WRAP" in caught.value.fix
