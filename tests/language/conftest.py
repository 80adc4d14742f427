"""The real model, its tokenizer, and a small model that speaks with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from klamp.training.models import load_model, load_tokenizer

SMOLLM2 = "examples/language/smollm2"
"""What examples/language/prepare.py writes."""


@pytest.fixture(scope="session")
def model() -> Any:
    """SmolLM2-135M-Instruct."""
    return load_model(SMOLLM2)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the model."""
    return load_tokenizer(SMOLLM2)


@pytest.fixture(scope="session")
def babbler(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a very small Llama with this vocabulary, whose random tokens are any bytes and special tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("babbler")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small_run(babbler: str, tmp_path: Path) -> Any:
    """The words of a `klamp train` of a second on the babbler; its folder is tmp_path/run."""
    words = f"train --model {babbler} --task examples/language/tasks.py:describe --output_dir {tmp_path / 'run'}"
    words += " --report_to none --cpu"
    words += " --prompts_per_step 2 --num_generations 4 --max_completion_length 12 --max_steps 2 --eval_size 2"
    words += " --save_every 1 --log_completions 8 --log_completions_every 1 --warmup_steps 0"
    return words.split()


def brief(completion: str, **_: Any) -> float:
    """A reward with a spread in every group, as few real texts are equally long: minus the length, in hundreds."""
    return -len(completion) / 100
