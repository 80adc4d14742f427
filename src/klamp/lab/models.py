"""Loads policies and tokenizers: the built-in one, local folders, checkpoints of klamp's, hub ids, LoRA adapters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from klamp.errors import ModelError
from klamp.files import at_home
from klamp.hosts.common.anchors import active_dropouts
from klamp.lab.checkpoint import check_policy, damaged
from klamp.lab.config import ModelConfig, TrainConfig
from klamp.lab.folders import POLICY, checkpoint_folders, policy_folder
from klamp.lab.sizing import Shape
from klamp.lab.tasks.arithmetic import (
    Progress,
    arithmetic_tokenizer,
    base_model_folder,
    cached_base_model,
    load_base_model,
)
from klamp.scoring.model_parts import check_whole

BUILTIN = "builtin"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_model(spec: str, dtype: str = "float32") -> PreTrainedModel:
    """Load a causal language model in evaluation mode; dropout is off for good, or the first KL would not be 0.

    `spec`: `builtin`, a local folder (also of a checkpoint of klamp's), or a hub id.

    Raises:
        ModelError: the folder or id holds no causal LM, or one that lacks a tensor.
        RunFolderError: it is in a checkpoint, and not as it was written.
    """
    kind = getattr(torch, dtype)
    model = load_base_model()[0].to(kind) if spec == BUILTIN else _whole(weights_folder(spec), dtype=kind)
    for dropout in active_dropouts(model):
        setattr(dropout.holder, dropout.name, 0.0)
    return model.eval()


def _whole(spec: str, **options: Any) -> PreTrainedModel:
    """The model of a folder or hub id, after a check that its files have all weights, and the written ones."""
    check_policy(Path(spec))
    kind = "a causal language model"
    model, loading = _pretrained(AutoModelForCausalLM, spec, kind, output_loading_info=True, **options)
    check_whole(loading, folder=spec)
    return model


def check_weights(folder: str) -> None:
    """Refuse the model of a folder, as `load_model` does, without reading its weights; ignores a hub id."""
    if Path(folder).is_dir():
        _whole(folder, device_map="meta")


def make_ready(spec: str, *, progress: Progress | None = None) -> None:
    """Teach the built-in model if it is named and not in the cache yet; ignores any other name."""
    if spec == BUILTIN:
        cached_base_model(progress=progress)


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model (see `load_model`), ready for left padding."""
    builtin = spec == BUILTIN  # its model may have to be trained first; its tokenizer need not
    tokenizer = arithmetic_tokenizer() if builtin else _pretrained(AutoTokenizer, weights_folder(spec), "a tokenizer")
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        why = "the folder has no tokenizer files, and without its words every text has no tokens"
        fix = "put tokenizer.json and tokenizer_config.json there (AutoTokenizer.from_pretrained(ITS_MODEL)"
        fix += ".save_pretrained(FOLDER)), or pass --tokenizer FOLDER"
        raise ModelError("the tokenizer is missing", got=spec, why=why, fix=fix)
    if tokenizer.eos_token_id is None:
        why = "without it no completion ends before the length limit"
        fix = "set eos_token in the tokenizer's configuration, or pass another --tokenizer"
        raise ModelError("the tokenizer has no end token", got=spec, why=why, fix=fix)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def _pretrained(loader: Any, spec: str, what: str, **options: Any) -> Any:
    """What a loader of transformers finds in a folder or under a hub id."""
    is_id = not Path(spec).exists() and bool(HUB_ID.fullmatch(spec))
    try:
        return loader.from_pretrained(spec, trust_remote_code=False, local_files_only=not is_id, **options)
    except Exception as error:  # the loaders raise a dozen types; all mean the same to the user
        here = "on the hub, or in its cache" if is_id else "at that path; an id of the hub reads OWNER/NAME"
        why = f"there is no model {here}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        fix = "check the path; a model folder needs config.json and weights, and the tokenizer's files or "
        fix += "--tokenizer FOLDER; builtin needs no hub"
        raise ModelError(f"cannot load {what}", got=spec, why=why, fix=fix) from error


def model_path(name: str) -> str:
    """The folder or hub id of a model, as a process elsewhere finds it."""
    if name == BUILTIN:
        return str(base_model_folder().absolute())
    folder = weights_folder(name)
    return str(Path(folder).absolute()) if Path(folder).is_dir() else folder


def weights_folder(spec: str) -> str:
    """The folder of the weights if klamp's checkpoint is named; any other name unchanged."""
    place = at_home(spec)
    if not place.is_dir():
        return spec
    if (place / "config.json").exists():
        return str(place)
    folder = Path(policy_folder(str(place)))
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        why = "only its own run trains an adapter further, and an adapter alone is not a model"
        fix = "continue that run with --resume, or merge it first: peft.AutoPeftModelForCausalLM.from_pretrained("
        fix += f"{str(folder)!r}).merge_and_unload().save_pretrained(FOLDER), with --tokenizer {folder}"
        raise ModelError("the folder holds a LoRA adapter, not a model", got=spec, why=why, fix=fix)
    if checkpoints := checkpoint_folders(place):
        why, fix = "each of its checkpoints is a model", f"name one of them; the newest is {checkpoints[-1]}"
        raise ModelError("the folder holds a run, not a model", got=spec, why=why, fix=fix)
    return str(folder)


def with_adapter(model: Any, config: ModelConfig, checkpoint: Path | None = None) -> nn.Module:
    """Put a LoRA adapter on a model, a fresh one or a checkpoint's."""
    from peft import PeftModel, get_peft_model

    if checkpoint is None:
        with adapter_errors(config), former_names():
            return get_peft_model(model, adapter_config(config))
    check_policy(checkpoint)
    try:
        with former_names():
            policy = PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
            keys = policy.load_adapter(str(checkpoint), "default", is_trainable=True)  # the first load names no keys
    except Exception as error:  # as in _pretrained
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        what, fix = "cannot load the LoRA adapter", "check that the folder holds an adapter of this model"
        raise ModelError(what, got=str(checkpoint), why=why, fix=fix) from error
    missing = [name for name in keys.missing_keys if "lora_" in name]
    loading = {"missing_keys": missing, "unexpected_keys": keys.unexpected_keys}
    check_whole(loading, folder=str(checkpoint), spare=False)
    return policy


def saved_policy(config: ModelConfig, start: nn.Module, weights: Path | None) -> nn.Module:
    """The policy that a run of this model saved as `weights`; None: `start`, with a fresh adapter if it trains one."""
    if config.lora_r:
        return with_adapter(start, config, weights)
    return start if weights is None else load_model(str(weights), config.dtype)


def load_policy(config: TrainConfig, start: nn.Module, resumed: Path | None = None) -> nn.Module:
    """The model that is trained: with its adapter, of the checkpoint `resumed` if a run goes on, on its device."""
    set_seed(config.run.seed)  # adapters start from random numbers
    try:
        policy = saved_policy(config.model, start, None if resumed is None else resumed / POLICY)
    except ModelError as error:
        if resumed is None:
            raise
        raise damaged(resumed, error) from error
    if config.model.gradient_checkpointing:
        with former_names():  # transformers 5.23 calls it activation_checkpointing_enable
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
        policy.train()
    return policy.to(device_of(config))  # pyright: ignore[reportArgumentType]


def adapter_config(config: ModelConfig) -> Any:
    from peft import LoraConfig

    targets = config.lora_target_modules
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )


@contextmanager
def adapter_errors(config: ModelConfig) -> Iterator[None]:
    """A context in which peft's refusal of an adapter is klamp's."""
    try:
        yield
    except ValueError as error:
        if "target" not in str(error).lower():
            raise
        what, fix = "the LoRA adapter does not fit the model", "use all-linear, or names of linear modules of the model"
        got = f"lora_target_modules={config.lora_target_modules}"
        raise ModelError(what, got=got, why=str(error), fix=fix) from error


@contextmanager
def former_names() -> Iterator[None]:
    """A context without warnings that peft and TRL use former names of transformers: no user can change that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*gradient_checkpointing.*deprecated", FutureWarning)
        yield


def device_of(config: TrainConfig) -> torch.device:
    """The device of a run: the accelerator if there is one, unless the run stays on the CPU."""
    on_cpu = config.run.cpu or not torch.accelerator.is_available()
    return (None if on_cpu else torch.accelerator.current_accelerator()) or torch.device("cpu")


def max_length(config: Any) -> int | None:
    """The longest sequence (in tokens) of a model, by its configuration; None: it does not say."""
    return getattr(config, "max_position_embeddings", None)


def end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a completion: the tokenizer's, and those that the model's generation settings add."""
    ids: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return sorted({tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None})  # pyright: ignore


def configuration(spec: str) -> Any:
    return _pretrained(AutoConfig, weights_folder(spec), "a model's configuration")


def shape_of(spec: str) -> Shape | None:
    """What of a model decides its memory, from its configuration alone; None: it is klamp's own, which is small."""
    if spec == BUILTIN:
        return None
    config = configuration(spec)
    inner: Any = config.get_text_config()
    with former_names(), torch.device("meta"):
        parameters = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    return Shape(parameters, inner.num_hidden_layers, inner.hidden_size, inner.vocab_size, inner.num_attention_heads)
