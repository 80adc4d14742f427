"""The floor of a step: it counts the products that a step cannot avoid, each as often as it is needed."""

from typing import Any

import pytest
import torch
from tests.training.conftest import tiny_llama
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.floor import Shape, _Products

pytestmark = pytest.mark.slow

SHAPE = Shape(prompts=2, prompt=5, group=3, completion=4)


def products(model: Any, phase: str) -> int:
    """Multiplications of the matrix products of a phase; attention is counted apart by torch."""
    made = _Products(model, SHAPE, lora_r=0)
    with FlopCounterMode(display=False) as counter:
        getattr(made, phase)()
    found = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in found.items() if "mm" in str(operation)) // 2


def test_every_phase_counts_each_weight_once_per_token() -> None:
    model = tiny_llama()
    trunk = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
    head = model.lm_head.weight.numel()
    prompts, tokens = SHAPE.prompts * SHAPE.prompt, SHAPE.tokens
    assert products(model, "prompts") == prompts * trunk + SHAPE.prompts * head
    assert products(model, "decoding") == (SHAPE.completion - 1) * SHAPE.rows * (trunk + head)
    assert products(model, "forward") == (prompts + tokens) * trunk + tokens * head == products(model, "reference")
    assert products(model, "backward") == 2 * ((prompts + tokens) * trunk + tokens * head), "inputs and weights"
