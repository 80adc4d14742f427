"""`klamp verify --model DIR`: a real model against a reference, on its own distributions."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch

from klamp.cli.options import VerifyOptions
from klamp.cli.verify import run
from klamp.cli.verify_model import PROMPTS, answer_model, perturbed, read_prompts
from klamp.core.estimators import ESTIMATORS
from klamp.errors import DataError, ModelError

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def shown(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    return run(argv, stream=out), out.getvalue()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a character tokenizer, saved to a folder."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzTOQ0123456789 .:?+_()\n"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_real_model_against_a_perturbed_copy(tiny: Path) -> None:
    code, text = shown("--model", str(tiny), "--tokens", "6")
    assert code == 0, text
    assert "against a copy with 0.05 noise" in text
    assert "k3, gradient own      KL(ref||policy)" in text
    assert "k1     " in text


def test_a_real_model_against_another_checkpoint_with_own_prompts(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = perturbed(AutoModelForCausalLM.from_pretrained(tiny), 0.3, seed=1)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "other")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n\nwhat is it?\n", encoding="utf-8")
    near = answer_model(VerifyOptions(model=str(tiny), prompts=str(prompts), tokens=4, noise=0.01))
    far = answer_model(
        VerifyOptions(model=str(tiny), ref_model=str(tmp_path / "other"), prompts=str(prompts), tokens=4)
    )
    assert near.passed
    assert far.passed
    assert near.tables[0].title.split(";")[0] == far.tables[0].title.split(";")[0]  # the same sampled prefixes
    assert float(near.tables[0].rows[0][1]) < float(far.tables[0].rows[0][1])


def test_a_broken_k3_fails_on_a_real_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: -(torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)
    code, text = shown("--model", str(tiny), "--tokens", "4")
    assert code == 1
    assert "FAIL  k3 is unbiased" in text


def test_a_model_without_noise_is_its_own_reference(tiny: Path) -> None:
    code, text = shown("--model", str(tiny), "--tokens", "4", "--noise", "0")
    assert code == 1
    assert "FAIL  the two models differ" in text


def test_models_of_different_vocabularies_are_refused(tiny: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="another vocabulary"):
        answer_model(VerifyOptions(model=str(tiny), ref_model=str(tmp_path), tokens=2))


def test_prompts(tmp_path: Path) -> None:
    assert read_prompts(None) == list(PROMPTS)
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b", "answer": 1}\n', encoding="utf-8")
    assert read_prompts(str(lines)) == ["a", "b"]
    lines.write_text('{"question": "a"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="without a prompt"):
        read_prompts(str(lines))
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(str(tmp_path / "empty.txt"))
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(str(tmp_path / "none.txt"))


def test_noise_touches_matrices_only_and_is_seeded() -> None:
    layer = torch.nn.Linear(4, 4)
    one, again, other = perturbed(layer, 0.1, 0), perturbed(layer, 0.1, 0), perturbed(layer, 0.1, 1)
    assert torch.equal(one.weight, again.weight)  # pyright: ignore
    assert not torch.equal(one.weight, other.weight)  # pyright: ignore
    assert torch.equal(one.bias, layer.bias)  # pyright: ignore
