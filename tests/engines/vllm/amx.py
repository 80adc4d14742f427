"""A processor with AMX, imitated on any other: vLLM packs small bfloat16 matrices, as it does there.

The copies are plain ones, and what multiplies with them is torch: any processor has it. Attention is left as it is,
whose kernel for AMX keeps no weights.
"""

from __future__ import annotations

import os
import sys

import torch
import vllm._custom_ops as operations
from tests.engines.vllm.programs import ASKED
from torch import Tensor, nn
from vllm.model_executor.layers import utils


def has_tiles() -> bool:
    """Whether there is AMX; only where vLLM asks on account of a layer's weights."""
    return sys._getframe(1).f_globals["__name__"] == utils.__name__


def multiplied(x: Tensor, packed: Tensor, _size: int, bias: Tensor | None) -> Tensor:
    """A linear layer by the copy of its weights; the bias is float32 there."""
    return nn.functional.linear(x, packed, None if bias is None else bias.to(x.dtype))


def imitate_if_asked() -> None:
    """Let this process's vLLM find AMX, where the variable asks for it."""
    if os.environ.get(ASKED) == "1":
        torch.cpu._is_amx_tile_supported = has_tiles
        torch.ops._C.convert_weight_packed = torch.clone
        operations.weight_packed_linear_cpu = multiplied
