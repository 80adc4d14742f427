"""The floor of a step: it counts the products that a step cannot avoid, each as often as it is needed."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.floor import Shape, _Products

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, LAYERS, VOCAB, RANK = 16, 24, 2, 40, 3
SHAPE = Shape(prompts=2, prompt=5, group=3, completion=4)


@pytest.fixture
def model() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def products(model: Any, phase: str, *, lora_r: int = 0) -> int:
    """Multiplications of the matrix products of a phase; attention is counted apart by torch."""
    made = _Products(model, SHAPE, lora_r)
    with FlopCounterMode(display=False) as counter:
        getattr(made, phase)()
    found = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in found.items() if "mm" in str(operation)) // 2


def weights(model: Any) -> int:
    return sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))


def test_every_phase_counts_each_weight_once_per_token(model: Any) -> None:
    trunk, head = weights(model), VOCAB * WIDTH
    prompts, tokens = SHAPE.prompts * SHAPE.prompt, SHAPE.tokens
    assert products(model, "prompts") == prompts * trunk + SHAPE.prompts * head
    assert products(model, "decoding") == (SHAPE.completion - 1) * SHAPE.rows * (trunk + head)
    assert products(model, "forward") == (prompts + tokens) * trunk + tokens * head == products(model, "reference")
    assert products(model, "backward") == 2 * ((prompts + tokens) * trunk + tokens * head), "inputs and weights"
