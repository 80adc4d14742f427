"""On a GPU: the same matrix with a real FastLanguageModel, in half precision, and Unsloth's compiled loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.unsloth.hosts import CASES, UNWEIGHTED, assert_same, attached, compared, move, saved, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from klamp.config import KLConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of a million weights, with heads as wide as Unsloth's kernels want them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, initializer_range=0.1))
    return saved(made.to(torch.bfloat16), tmp_path_factory.mktemp("tiny"))


def fast_model(folder: str) -> Any:
    from unsloth import FastLanguageModel

    made, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=128, load_in_4bit=False, dtype=torch.bfloat16)
    return FastLanguageModel.get_peft_model(made, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"])


@pytest.mark.parametrize("case", CASES)
def test_unsloths_own_kl(case: str, folder: str, tmp_path: Path) -> None:
    kl = KLConfig(beta=0.3, kl_gradient="own")
    host = attached(tmp_path, kl, fast_model(folder), bf16=True, **UNWEIGHTED, **CASES[case])
    move(host.model, 0.1)
    assert_same(compared(host), steps=host.args.max_steps, weights=2e-2)


def test_a_run_with_a_controller(folder: str, tmp_path: Path) -> None:
    """A beta of another value in every step does not make Unsloth compile its loss again."""
    kl = KLConfig(beta=0.1, target_kl=1e-5)
    host = attached(tmp_path, kl, fast_model(folder), bf16=True, max_steps=6, learning_rate=1e-3)
    host.train()
    steps = [entry for entry in host.state.log_history if "kl/k3" in entry]
    assert len(steps) == 6 and len({entry["beta"] for entry in steps}) > 2
    assert steps[0]["kl/k3"] < 1e-3 < 1 and steps[-1]["kl/k3"] > steps[0]["kl/k3"]
