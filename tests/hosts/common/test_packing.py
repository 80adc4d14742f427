"""Whether vLLM packs weights on this CPU, on processors with and without AMX, before and after it is switched off."""

from __future__ import annotations

import pytest
import torch
from tests.hosts.common.fake_vllm import put_in_place

from klamp.errors import ConfigError
from klamp.hosts.common.packing import check_packing, pack_nothing, packing

ONEDNN, AMX = "oneDNN", "a kernel for AMX"


@pytest.mark.parametrize(
    ("amx", "dtype", "kernels"),
    [
        (False, torch.float32, [ONEDNN]),
        (False, torch.bfloat16, [ONEDNN]),
        (True, torch.float32, [ONEDNN]),
        (True, torch.bfloat16, [ONEDNN, AMX]),
    ],
)
def test_what_packs_is_what_vllm_says(monkeypatch, amx, dtype, kernels):
    vllm = put_in_place(monkeypatch, amx=amx)
    assert packing(dtype) == kernels
    vllm._custom_ops._supports_onednn = False
    assert packing(dtype) == kernels[1:], "the processor's own kernel is there all the same"
    pack_nothing()
    assert packing(dtype) == []
    check_packing(dtype)


def test_a_gpu_packs_nothing(monkeypatch):
    put_in_place(monkeypatch, amx=True, cpu=False)
    assert packing(torch.bfloat16) == []
    check_packing(torch.bfloat16)


def test_a_vllm_without_the_switches_is_not_said_to_pack(monkeypatch):
    vllm = put_in_place(monkeypatch)
    del vllm._custom_ops._supports_onednn
    del vllm.model_executor.layers.utils.check_cpu_sgl_kernel
    assert packing(torch.bfloat16) == []


def test_the_refusal_names_the_kernels_the_type_and_the_way_out(monkeypatch):
    put_in_place(monkeypatch, amx=True)
    with pytest.raises(ConfigError, match="vLLM packs the model's weights on this CPU") as error:
        check_packing(torch.bfloat16)
    assert error.value.got == "oneDNN and a kernel for AMX, for torch.bfloat16"
    assert "new weights do not reach the packed copies" in error.value.why
    for way in ("sampler='own'", "use_vllm=False", "GPU", f"{pack_nothing.__module__}.{pack_nothing.__name__}()"):
        assert way in error.value.fix
