"""Prepares a run up to its first step: everything is loaded and checked, every refusal happens here."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from klamp.errors import ConfigError, KLWarning, ModelError
from klamp.hosts.common.versions import caution_beside
from klamp.scoring.model_parts import check_same_vocabulary, output_size
from klamp.scoring.probe import probe
from klamp.scoring.scorer import Scorer
from klamp.tasks import check_prompts, load_task, named_model_folder, named_reward
from klamp.tasks.arithmetic import MAX_MODEL_LENGTH, arithmetic_tokenizer
from klamp.tasks.base import NO_REWARD, Task, has_own_prompts
from klamp.tasks.files import check_columns, read_rows
from klamp.tasks.named_models import NAMED_MODELS
from klamp.training import checkpoint
from klamp.training.config import ModelConfig, TrainConfig, reference_kind
from klamp.training.context import Context
from klamp.training.folders import POLICY, check_folder, held, make_folder
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
from klamp.training.processes import check_precision, timeout_of
from klamp.training.references import AdapterOffReference, FrozenReference, MovingReference, Reference, connect
from klamp.training.teachers import check_tokens_of, load_teachers


def on_cpu(config: TrainConfig) -> bool:
    """Whether this process stays on the CPU: asked to, trained elsewhere, or without a GPU, to join processes."""
    return config.run.cpu or config.run.backend == "verl" or not torch.accelerator.is_available()


def make_accelerator(config: TrainConfig, folder: Path) -> Accelerator:
    """The accelerator of a run; its trackers are named and not started yet.

    Args:
        config: the run.
        folder: its folder, which the trackers write into.

    Raises:
        ConfigError: an unknown tracker, prompts that do not divide over the processes, or mixed precision for klamp's
            own loop.
    """
    if is_initialized() and AcceleratorState().mixed_precision != "no":
        AcceleratorState._reset_state()  # that of another trainer in this process (TRL's default) would be this run's
    usable = {"all", *(str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers())}
    if missing := [name for name in config.run.report_to if name not in usable]:
        raise ConfigError(
            "a tracker cannot be used",
            got=f"report_to={config.run.report_to}",
            why=f"accelerate does not know it, or it is not installed: {', '.join(missing)}",
            fix="use tensorboard, install the tracker's package, or leave it out of report_to",
        )
    accelerator = Accelerator(cpu=on_cpu(config), log_with=list(config.run.report_to) or None, project_dir=str(folder))
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ConfigError(
            "the processes that were launched did not find each other",
            got=f"{launched} launched, {accelerator.num_processes} joined",
            why="each of them would train a model of its own in the same folder",
            fix="launch with torchrun or accelerate launch --multi_gpu (which also joins CPU processes)",
        )
    if config.run.backend == "local":
        check_precision(accelerator)
    if config.rollout.prompts_per_step % accelerator.num_processes:
        raise ConfigError(
            "the prompts of a step do not divide over the processes",
            got=f"prompts_per_step={config.rollout.prompts_per_step}, {accelerator.num_processes} processes",
            why="every process takes the same number of whole groups",
            fix=f"use a multiple of {accelerator.num_processes}",
        )
    return accelerator


def load_context(config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer]) -> Context:
    """Load model, tokenizer and task of a run, and check that they fit together; the policy has no adapter yet.

    Raises:
        ModelError, DataError, RewardError, UnknownNameError: whatever does not fit, before any work.
    """
    name = config.model.model
    with accelerator.main_process_first():  # the built-in model is trained once, by one process
        make_ready(name, progress=progress_of(observers))
    model = load_model(name, config.model.dtype)  # by all together: ZeRO-3 gives each its part
    tokenizer = load_tokenizer(config.model.tokenizer or name)
    _check_vocabulary(model, tokenizer, config.model)
    return Context(
        config=config,
        output_dir=folder,
        accelerator=accelerator,
        policy=model,
        tokenizer=tokenizer,
        task=load_prompts(config, tokenizer, longest=max_length(model)),
        stop=end_tokens(model, tokenizer),
        vocabulary=output_size(model),
    )


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


def open_inputs(config: TrainConfig) -> Inputs | str:
    """Open the tokenizer, the prompts and the reward of a run as the run itself will, without its weights.

    A tokenizer of a hub is downloaded as the run would; a model that klamp has to make first is not made: then the data
    file and the reward are opened alone, and the answer says why.

    Args:
        config: what would run.

    Raises:
        ModelError, DataError, RewardError, ConfigError: what would stop the run before its first step.
    """
    given, task = config.model, config.task
    named = given.tokenizer or given.model
    if unready := _unready(config, named):
        if not has_own_prompts(task.task):
            for file in filter(None, (task.task, task.eval_split)):
                check_columns(read_rows(file), file, task)
        if task.reward not in ("", NO_REWARD):
            named_reward(task.reward)
        return unready
    tokenizer, longest = _tokenizer(config, named)
    found = load_task(task, tokenizer)
    held_out = [example for rows in found.evaluation.values() for example in rows]
    tokens = check_prompts([*found.train, *held_out], tokenizer, longest, config.rollout.max_completion_length)
    return Inputs(training=len(found.train), held_out=len(held_out), longest=tokens)


def _unready(config: TrainConfig, named: str) -> str:
    """Why there is no tokenizer to be opened yet; empty: there is one."""
    missing = [n for n in (named, config.model.model) if n in NAMED_MODELS and not named_model_folder(n).is_dir()]
    return f"{missing[0]} is converted first" if missing else ""


def _tokenizer(config: TrainConfig, named: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer, and how many tokens the model can hold; None: it does not say."""
    builtin = config.model.model == BUILTIN
    # the built-in model may have to be taught first; its tokenizer need not
    tokenizer = ready_tokenizer(arithmetic_tokenizer(), named) if named == BUILTIN else load_tokenizer(named)
    if builtin:
        return tokenizer, MAX_MODEL_LENGTH
    return tokenizer, describe_folder(config.model.model)[0]


def build(config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer]) -> Context:
    """Load all that klamp's own loop needs: policy with its adapter, scorer, reference; a run's newest checkpoint's.

    Raises:
        ModelError, DataError, RewardError, UnknownNameError: whatever does not fit, before any work.
    """
    resumed = checkpoint.whole_newest(folder) if config.run.resume else None
    context, kind = load_context(config, accelerator, folder, observers), reference_kind(config)
    remote = connect(config, context.task, context.tokenizer) if kind == "remote" else None
    copied = None
    if kind == "frozen":  # before the policy has an adapter: its padding may be cut
        named = config.model.ref_model is not None
        copied = load_reference(config, context) if named else copy.deepcopy(context.policy)
    context.policy = policy = _policy(context.policy, config, resumed, accelerator)
    context.scorer = context.wrapped = scorer = Scorer(policy, probe(policy))
    if remote:
        context.reference = remote
    else:
        context.reference, context.original = _references(config, kind, scorer, copied, accelerator)
    context.teachers = load_teachers(config, scorer, context.task, context.tokenizer, accelerator)
    return context


def _check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    size = input_size(model)
    if len(tokenizer) > size:
        raise ModelError(
            "the tokenizer has more tokens than the model",
            got=f"tokenizer {len(tokenizer)}, model {size} ({config.model})",
            why="some prompts would have no embedding",
            fix="use the model's own tokenizer",
        )


def _policy(start: nn.Module, config: TrainConfig, resumed: Path | None, accelerator: Accelerator) -> nn.Module:
    set_seed(config.run.seed)  # adapters start from random numbers: the same on every process
    policy = _resumed(start, config, resumed) if resumed else start
    if config.model.lora_r and not resumed:
        policy = with_adapter(start, config.model)  # pyright: ignore
    if config.model.gradient_checkpointing:
        with former_names():  # transformers 5.23 calls it activation_checkpointing_enable
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
        policy.train()
    return policy.to(accelerator.device)


def _resumed(start: nn.Module, config: TrainConfig, folder: Path) -> nn.Module:
    """Load the policy of a checkpoint."""
    try:
        if config.model.lora_r:
            return with_adapter(start, config.model, folder / POLICY)  # pyright: ignore
        return load_model(str(folder / POLICY), config.model.dtype)
    except ModelError as error:
        raise checkpoint.damaged(folder, error) from error


def _references(
    config: TrainConfig, kind: str, scorer: Scorer, copied: nn.Module | None, accelerator: Accelerator
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
            started = _policy(load_model(config.model.model, config.model.dtype), config, None, accelerator)
        copies = [_placed(copy.deepcopy(started), config, accelerator) for _ in range(2)]
        moving = MovingReference(copies[0], decay=decay, reset_steps=every, traits=traits)
        return moving, FrozenReference(copies[1], traits=traits)
    assert copied is not None
    placed, named = _placed(copied, config, accelerator), config.model.ref_model
    if named is None:
        return FrozenReference(placed, traits=traits), None
    return FrozenReference(placed, name=f"{named}, frozen"), None


def load_reference(config: TrainConfig, context: Context) -> PreTrainedModel:
    """The model that ref_model names. What the policy's vocabulary is padded with beyond the reference's is cut.

    Entries that the tokenizer does not have mean nothing, and under a reference without them the KL would be infinite.

    Raises:
        ModelError: there is none, or its tokens are others than the policy's.
    """
    assert config.model.ref_model is not None
    policy: Any = context.policy
    model = load_model(config.model.ref_model, config.model.dtype)
    check_tokens_of(config.model.ref_model, context.tokenizer, who="reference")
    if len(context.tokenizer) <= (entries := output_size(model)) < context.vocabulary:
        text = f"The policy's entries from {entries} on are cut: the tokenizer has none of them, nor has the reference."
        warnings.warn(text, KLWarning, stacklevel=2)
        policy.resize_token_embeddings(entries)
        context.vocabulary = entries
    check_same_vocabulary(model, policy, larger=True)
    return model


def _placed(model: nn.Module, config: TrainConfig, accelerator: Accelerator) -> nn.Module:
    """The reference's weights on the device and in the data type that the configuration names."""
    kl = config.kl
    dtype = None if kl.reference_dtype is None else getattr(torch, kl.reference_dtype)
    try:
        device = accelerator.device if kl.reference_device is None else torch.device(kl.reference_device)
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


@contextmanager
def opened_folder(config: TrainConfig) -> Iterator[Path]:
    """The folder of the run, the same one for all processes; the main process holds its lock.

    Raises:
        RunFolderError: it holds another run, or one that is under way; or there is none to continue.
    """
    with ExitStack() as stack:
        chosen: list[str | Exception] = [""]
        if PartialState(cpu=on_cpu(config), timeout=timeout_of(config)).is_main_process:
            try:
                chosen[0] = str(stack.enter_context(_own(config)))
            except Exception as error:  # raised below on every process, so that none of them waits for the others
                chosen[0] = error
        broadcast_object_list(chosen)
        if isinstance(chosen[0], Exception):
            raise chosen[0]
        yield Path(chosen[0])


@contextmanager
def _own(config: TrainConfig) -> Iterator[Path]:
    folder, made = make_folder(config)
    try:
        with held(folder, by="klamp train"):
            check_folder(folder, resume=config.run.resume)  # another run may have been here since it was made
            yield folder
    finally:
        if made:
            with suppress(OSError):  # it goes if the run was refused before it wrote anything
                folder.rmdir()
