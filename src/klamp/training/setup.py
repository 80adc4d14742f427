"""Prepares a run up to its first step: everything is loaded and checked, every refusal happens here."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from klamp.errors import ConfigError, KLWarning, ModelError
from klamp.hosts.common.versions import caution_beside
from klamp.scoring.model_parts import check_same_vocabulary, output_size
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer
from klamp.tasks import check_prompts, load_task
from klamp.tasks.arithmetic import MAX_MODEL_LENGTH, arithmetic_tokenizer
from klamp.tasks.base import Task
from klamp.training import checkpoint
from klamp.training.config import ModelConfig, TrainConfig, reference_kind
from klamp.training.context import Context
from klamp.training.folders import POLICY
from klamp.training.models import (
    BUILTIN,
    describe_folder,
    end_tokens,
    former_names,
    input_size,
    load_model,
    load_tokenizer,
    make_ready,
    max_length,
    ready_tokenizer,
    with_adapter,
)
from klamp.training.observers import Observer, progress_of
from klamp.training.references import AdapterOffReference, FrozenReference, MovingReference, Reference, connect
from klamp.training.teachers import check_tokens_of, load_teachers


def check_alone() -> None:
    """Refuse several processes: each of them would train a model of its own.

    Raises:
        ConfigError: a launcher started more than one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "klamp's own loop runs in one process, on one device",
            got=f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            why="TRL and verl distribute a run, with the same configuration of the KL",
            fix="start it without a launcher; for several GPUs use --backend trl or --backend verl",
        )


def on_cpu(config: TrainConfig) -> bool:
    """Whether a run stays on the CPU: it is asked to, or there is no accelerator."""
    return config.run.cpu or not torch.accelerator.is_available()


def device_of(config: TrainConfig) -> torch.device:
    """The device of a run."""
    found = None if on_cpu(config) else torch.accelerator.current_accelerator()
    return found or torch.device("cpu")


def load_prompts(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, *, longest: int | None) -> Task:
    """The task of a run, each of whose prompts leaves room for a completion.

    Args:
        config: of the run.
        tokenizer: of its model.
        longest: tokens that the model can hold, prompt and completion together; None: no limit.

    Raises:
        DataError, RewardError, UnknownNameError: a task or a prompt that cannot be used.
    """
    caution_beside("transformers")
    task = load_task(config.task, tokenizer)
    every = [*task.train, *(example for rows in task.evaluation.values() for example in rows)]
    check_prompts(every, tokenizer, longest, config.rollout.max_completion_length)
    return task


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What was found when the inputs of a run were opened."""

    training: int
    """Prompts to train on."""
    held_out: int
    """Prompts that are held out, of all skills."""
    longest: int
    """Tokens of the longest prompt."""


def open_inputs(config: TrainConfig) -> Inputs:
    """Open the tokenizer, the prompts and the reward of a run as the run itself will, without its weights.

    A tokenizer of a hub is downloaded as the run would.

    Args:
        config: what would run.

    Raises:
        ModelError, DataError, RewardError, ConfigError: what would stop the run before its first step.
    """
    given, task = config.model, config.task
    named = given.tokenizer or given.model
    tokenizer, longest = _tokenizer(config, named)
    found = load_task(task, tokenizer)
    held_out = [example for rows in found.evaluation.values() for example in rows]
    tokens = check_prompts([*found.train, *held_out], tokenizer, longest, config.rollout.max_completion_length)
    return Inputs(training=len(found.train), held_out=len(held_out), longest=tokens)


def _tokenizer(config: TrainConfig, named: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer, and how many tokens the model can hold; None: it does not say."""
    builtin = config.model.model == BUILTIN
    # the built-in model may have to be taught first; its tokenizer need not
    tokenizer = ready_tokenizer(arithmetic_tokenizer(), named) if named == BUILTIN else load_tokenizer(named)
    if builtin:
        return tokenizer, MAX_MODEL_LENGTH
    return tokenizer, describe_folder(config.model.model)[0]


def build(config: TrainConfig, folder: Path, observers: Sequence[Observer], *, resumed: Path | None = None) -> Context:
    """Load all that a run needs: policy with its adapter, scorer, anchors, task.

    Args:
        config: of the run.
        folder: of the run.
        observers: told how far slow loading is.
        resumed: the checkpoint whose policy it is.

    Raises:
        ModelError, DataError, RewardError, UnknownNameError: whatever does not fit, before any work.
    """
    name, kind = config.model.model, reference_kind(config)
    make_ready(name, progress=progress_of(observers))
    start = load_model(name, config.model.dtype)
    tokenizer = load_tokenizer(config.model.tokenizer or name)
    _check_vocabulary(start, tokenizer, config.model)
    task = load_prompts(config, tokenizer, longest=max_length(start))
    stop, remote = end_tokens(start, tokenizer), None
    if kind == "remote":
        remote = connect(config, task, tokenizer)
    copied = None
    if kind == "frozen":  # before the policy has an adapter: its padding may be cut
        named = config.model.ref_model is not None
        copied = load_reference(config, start, tokenizer) if named else copy.deepcopy(start)
    vocabulary = output_size(start)
    policy = _policy(start, config, resumed)
    scorer = Scorer(policy, probe(policy))
    reference, original = (remote, None) if remote else _references(config, kind, scorer, copied)
    return Context(
        config=config,
        output_dir=folder,
        policy=policy,
        tokenizer=tokenizer,
        task=task,
        stop=stop,
        vocabulary=vocabulary,
        scorer=scorer,
        reference=reference,
        original=original,
        teachers=load_teachers(config, scorer, task, tokenizer),
    )


def _check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    size = input_size(model)
    if len(tokenizer) > size:
        raise ModelError(
            "the tokenizer has more tokens than the model",
            got=f"tokenizer {len(tokenizer)}, model {size} ({config.model})",
            why="some prompts would have no embedding",
            fix="use the model's own tokenizer",
        )


def _policy(start: nn.Module, config: TrainConfig, resumed: Path | None) -> nn.Module:
    set_seed(config.run.seed)  # adapters start from random numbers
    policy = _resumed(start, config, resumed) if resumed else start
    if config.model.lora_r and not resumed:
        policy = with_adapter(start, config.model)  # pyright: ignore
    if config.model.gradient_checkpointing:
        with former_names():  # transformers 5.23 calls it activation_checkpointing_enable
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
        policy.train()
    return policy.to(device_of(config))


def _resumed(start: nn.Module, config: TrainConfig, folder: Path) -> nn.Module:
    """Load the policy of a checkpoint."""
    try:
        if config.model.lora_r:
            return with_adapter(start, config.model, folder / POLICY)  # pyright: ignore
        return load_model(str(folder / POLICY), config.model.dtype)
    except ModelError as error:
        raise checkpoint.damaged(folder, error) from error


def _references(
    config: TrainConfig, kind: str, scorer: Scorer, copied: nn.Module | None
) -> tuple[Reference | None, Reference | None]:
    """The reference of a run, and for a moving one the model that it started from."""
    policy, traits = scorer.model, scorer.traits
    if kind in ("none", "sampler"):
        return None, None
    if kind == "adapter_off":
        return AdapterOffReference(policy, traits=traits), None
    if kind in ("ema", "periodic"):
        decay, every = (config.kl.reference_decay, None) if kind == "ema" else (None, config.kl.reference_reset_steps)
        started = policy
        if config.run.resume:  # the policy as it was before the first step
            started = _policy(load_model(config.model.model, config.model.dtype), config, None)
        copies = [_placed(copy.deepcopy(started), config) for _ in range(2)]
        moving = MovingReference(copies[0], decay=decay, reset_steps=every, traits=traits)
        return moving, FrozenReference(copies[1], traits=traits)
    assert copied is not None
    placed, named = _placed(copied, config), config.model.ref_model
    if named is None:
        return FrozenReference(placed, traits=traits), None
    return FrozenReference(placed, name=f"{named}, frozen"), None


def load_reference(config: TrainConfig, policy: Any, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model that ref_model names. What the policy's vocabulary is padded with beyond the reference's is cut.

    Entries that the tokenizer does not have mean nothing, and under a reference without them the KL would be infinite.

    Raises:
        ModelError: there is none, or its tokens are others than the policy's.
    """
    assert config.model.ref_model is not None
    model = load_model(config.model.ref_model, config.model.dtype)
    check_tokens_of(config.model.ref_model, tokenizer, who="reference")
    if len(tokenizer) <= (entries := output_size(model)) < output_size(policy):
        text = f"The policy's entries from {entries} on are cut: the tokenizer has none of them, nor has the reference."
        warnings.warn(text, KLWarning, stacklevel=2)
        policy.resize_token_embeddings(entries)
    check_same_vocabulary(model, policy, larger=True)
    return model


def _placed(model: nn.Module, config: TrainConfig) -> nn.Module:
    """The reference's weights on the device and in the data type that the configuration names."""
    kl = config.kl
    dtype = None if kl.reference_dtype is None else getattr(torch, kl.reference_dtype)
    try:
        device = device_of(config) if kl.reference_device is None else torch.device(kl.reference_device)
        return model.to(device=device, dtype=dtype)
    except (RuntimeError, AssertionError) as error:  # torch's own, also where it was built without CUDA
        if kl.reference_device is None:
            raise
        raise ConfigError(
            "reference_device cannot be used",
            got=kl.reference_device,
            why=str(error).partition("\n")[0],
            fix="name a device of this machine (cpu, cuda:1), or leave it out for the policy's",
        ) from error
