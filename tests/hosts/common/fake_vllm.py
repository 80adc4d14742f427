"""A stand-in for the parts of vLLM that decide whether it packs weights, on a processor of either kind."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def put_in_place(monkeypatch: pytest.MonkeyPatch, *, amx: bool = False, cpu: bool = True) -> Any:
    """The module `vllm` from now on to the end of a test.

    Args:
        monkeypatch: pytest's.
        amx: whether the processor has what vLLM's own kernel needs.
        cpu: whether this vLLM computes on it.
    """
    vllm: Any = ModuleType("vllm")
    vllm._custom_ops = SimpleNamespace(_supports_onednn=True)
    vllm.platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: cpu))
    layers = SimpleNamespace(check_cpu_sgl_kernel=lambda n, k, dtype: amx and dtype in SIXTEEN_BITS and fits(n, k))
    vllm.model_executor = SimpleNamespace(layers=SimpleNamespace(utils=layers))
    for name, module in {
        "vllm": vllm,
        "vllm._custom_ops": vllm._custom_ops,
        "vllm.platforms": vllm.platforms,
        "vllm.model_executor.layers.utils": layers,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return vllm


def fits(n: int, k: int) -> bool:
    """Whether vLLM's own kernel takes a matrix: of whole tiles, and less than a MiB."""
    return n % 16 == 0 and k % 32 == 0 and 0 < n * k * 2 <= 2**20
