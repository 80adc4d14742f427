"""What is refused before TRL starts, and what is handed to it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from tests.hosts.common.fake_vllm import put_in_place
from tests.training.conftest import steps_of, stored, tiny_llama
from tests.training.test_trainer import Recorder

from klamp.core.controllers import StepController
from klamp.errors import ConfigError, MissingLibrary, ModelError
from klamp.hosts.common.sampler_weights import packing
from klamp.training.backends import train_run
from klamp.training.in_trl import run as module
from klamp.training.in_trl.run import check_devices, check_split, check_vllm, gathered


@pytest.mark.parametrize("changes", [{"sampler": "vllm"}, {"sampler_url": "http://there:8000"}])
def test_a_missing_vllm_is_said_before_any_work(changes, quick, tmp_path, monkeypatch):
    monkeypatch.setattr("klamp.training.in_trl.run.find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match="vllm].*, which is not installed") as missing:
        train_run(quick(**changes))
    assert 'pip install "trl[vllm]"' in str(missing.value)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("klamp.training.in_trl.run.find_spec", lambda name: object())
    check_vllm(quick(**changes))


def test_an_engine_in_this_process_packs_no_weights(quick, monkeypatch):
    put_in_place(monkeypatch, amx=True)
    monkeypatch.setattr("klamp.training.in_trl.run.find_spec", lambda name: object())

    def made(*_, **__):
        raise ConfigError("the trainer is made now", got=packing(torch.bfloat16))

    monkeypatch.setattr(module, "RunTrainer", made)
    for changes, packs in (({"sampler_url": "http://there:8000"}, True), ({"sampler": "vllm"}, False)):
        with pytest.raises(ConfigError, match="the trainer is made now") as error:
            train_run(quick(**changes))
        assert bool(error.value.got) == packs


def test_a_missing_trl_is_one_readable_error():
    code = (
        "import sys; from importlib import metadata; found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'trl': raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
        "from klamp.errors import KlampError\n"
        "try:\n    import klamp.training.in_trl.run\n"
        "except KlampError as error:\n    print(error, 'trl' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "klamp.trl needs trl" in done.stdout or "needs the library trl" in done.stdout, done.stdout
    assert done.stdout.strip().endswith("False")


def test_an_adapter_that_fits_nowhere_is_refused(quick):
    with pytest.raises(ModelError, match="adapter does not fit"):
        train_run(quick(lora_r=2, lora_target_modules=("c_attn",)))


def test_one_process_for_each_gpu(quick, monkeypatch):
    monkeypatch.setattr("klamp.training.in_trl.run.on_cpu", lambda config: False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="one process for each GPU") as refused:
        train_run(quick())
    assert "--prepare --gpus 4" in str(refused.value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_devices(quick())


@pytest.mark.parametrize("stage", [2, None])
def test_copies_of_weights_that_are_divided_are_refused(quick, monkeypatch, stage):
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    kind = DistributedType.FSDP if stage is None else DistributedType.DEEPSPEED
    accelerator: Any = SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(stage is None))
    with pytest.raises(ConfigError, match="copies of 16-bit"):
        check_split(quick(dtype="bfloat16"), accelerator)
    check_split(quick(dtype="bfloat16", lora_r=2), accelerator)
    check_split(quick(dtype="bfloat16", master_weights="none"), accelerator)


@pytest.mark.parametrize("version", ["1", None])
def test_fsdp1_is_refused_before_any_work(quick, tmp_path, monkeypatch, version):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    if version:
        monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(ConfigError, match="FSDP1") as caught:
        train_run(quick())
    assert "--fsdp_version 2" in caught.value.fix and not (tmp_path / "run").exists()


def test_fsdp_that_accelerate_drops_on_cpus_is_refused(quick, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
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


def test_another_reference_is_taken_and_its_distance_is_no_surprise(quick, tmp_path):
    other = stored(tiny_llama(initializer_range=0.1), tmp_path / "other")
    seen = Recorder()
    train_run(quick(ref_model=other, max_steps=1), [seen])
    assert steps_of(tmp_path / "run")[0]["kl/k3"] > 0.1
    assert seen.info.reference == "the model passed as ref_model"
    assert not [text for text in seen.told("warning") if "step 0" in text or "before the first" in text]


def test_a_distance_before_the_first_update_is_told(quick, recwarn):
    seen = Recorder()
    train_run(quick(reference_dtype="bfloat16", max_steps=1), [seen])
    (text,) = seen.told("warning")
    assert "bfloat16" in text
    assert not [str(w.message) for w in recwarn if "before" in str(w.message)], "told once"


def test_a_reference_that_moves_is_trl_s(quick, tmp_path):
    still, moving, seen = tmp_path / "still", tmp_path / "moving", Recorder()
    train_run(quick(output_dir=str(still)))
    train_run(quick(output_dir=str(moving), reference="periodic", reference_reset_steps=1), [seen])
    assert steps_of(still)[-1]["kl/k3"] > 0.01
    assert steps_of(moving)[-1]["kl/k3"] < 1e-6
    assert "moved by a share of 1" in seen.info.reference


def test_without_a_kl_no_reference_is_loaded(quick, tmp_path):
    seen = Recorder()
    train_run(quick(beta=0.0), [seen])
    rows = steps_of(tmp_path / "run")
    assert not any(name.startswith("kl/") for row in rows for name in row)
    assert all(row["beta"] == 0 for row in rows)
    assert seen.info.reference.startswith("none")


def test_the_controller_moves_beta_from_step_to_step(quick, tmp_path):
    train_run(quick(target_kl=0.01, kl_controller="step", max_steps=4))
    controller, betas = StepController(0.5, target=0.01), []
    for row in steps_of(tmp_path / "run"):
        betas.append(controller.value)
        controller.update(row["kl/exact"])
    assert [row["beta"] for row in steps_of(tmp_path / "run")] == pytest.approx(betas, rel=1e-6)
    assert betas[2] != betas[3]
