"""From a configuration to a run that is ready to take its first step; every refusal happens here."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.optim import AdamW
from transformers import PreTrainedTokenizerBase, get_scheduler

from klamp.config import build_objective
from klamp.errors import ConfigError, ModelError
from klamp.tasks import check_prompts, load_task
from klamp.training import checkpoint
from klamp.training.config import ModelConfig, TrainConfig
from klamp.training.context import Context
from klamp.training.models import (
    BUILTIN,
    end_tokens,
    load_model,
    load_tokenizer,
    max_length,
    output_size,
    with_adapter,
)
from klamp.training.observers import Observer
from klamp.training.references import AdapterOffReference, FrozenReference, Reference
from klamp.training.runlog import check_folder, free_folder


def make_accelerator(config: TrainConfig, folder: Path) -> Accelerator:
    """The accelerator of a run, with its trackers named but not yet begun.

    Args:
        config: the run.
        folder: its folder, which the trackers write into.

    Raises:
        ConfigError: an unknown tracker, or prompts that do not divide over the processes.
    """
    try:
        accelerator = Accelerator(
            cpu=config.run.cpu,
            log_with=list(config.run.report_to) or None,
            project_dir=str(folder),
        )
    except ValueError as error:
        raise ConfigError(
            "a tracker cannot be used",
            got=f"report_to={config.run.report_to}",
            why=str(error),
            fix="use tensorboard, or install the tracker's package",
        ) from error
    if config.rollout.prompts_per_step % accelerator.num_processes:
        raise ConfigError(
            "the prompts of a step do not divide over the processes",
            got=f"prompts_per_step={config.rollout.prompts_per_step}, {accelerator.num_processes} processes",
            why="every process takes the same number of whole groups",
            fix=f"use a multiple of {accelerator.num_processes}",
        )
    return accelerator


def choose_folder(config: TrainConfig) -> Path:
    """The folder of the run, the same on every process.

    Raises:
        RunFolderError: it holds another run, or there is none to continue.
    """
    chosen: list[str | Exception] = [""]
    if PartialState(cpu=config.run.cpu).is_main_process:
        try:
            name = Path(config.task.task).stem.replace(":", "-") or "run"
            given = config.run.output_dir
            folder = Path(given) if given else free_folder(Path("runs"), name)
            check_folder(folder, resume=config.run.resume)
            chosen[0] = str(folder)
        except Exception as error:  # raised below on every process, so that none of them waits for the others
            chosen[0] = error
    broadcast_object_list(chosen)
    if isinstance(chosen[0], Exception):
        raise chosen[0]
    return Path(chosen[0])


def build(config: TrainConfig, accelerator: Accelerator, folder: Path, observers: Sequence[Observer]) -> Context:
    """Load model, tokenizer, task and reference, and check that they fit.

    Raises:
        ModelError, DataError, RewardError, UnknownNameError: whatever does not fit, before any work.
    """

    def progress(done: int, total: int, loss: float) -> None:
        for observer in observers:
            observer.on_loading("teaching the built-in base model", done, total, loss)

    resumed = checkpoint.newest(folder) if config.run.resume else None
    with accelerator.main_process_first():  # the built-in model is trained once, by one process
        start = load_model(config.model.model, config.model.dtype, progress=progress)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    _check_vocabulary(start, tokenizer, config.model)
    task = load_task(config.task, tokenizer)
    longest = max_length(start)
    every = [*task.train, *(e for rows in task.evaluation.values() for e in rows)]
    check_prompts(every, tokenizer, longest, config.rollout.max_completion_length)
    vocabulary = output_size(start)
    stop = end_tokens(start, tokenizer)
    reference_start = copy.deepcopy(start) if _needs_copy(config) else None
    policy = _policy(start, config, resumed, accelerator)
    reference = _reference(config, policy, reference_start, accelerator)
    return Context(
        config=config,
        output_dir=folder,
        accelerator=accelerator,
        policy=policy,
        wrapped=policy,
        reference=reference,
        tokenizer=tokenizer,
        task=task,
        objective=build_objective(config.kl, config.loss, max_length=config.rollout.max_completion_length),
        stop=stop,
        vocabulary=vocabulary,
        reference_length=config.kl.kl_reference_length,
    )


def _check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    size = int(model.get_input_embeddings().weight.shape[0])  # pyright: ignore[reportCallIssue]
    if len(tokenizer) > size:
        raise ModelError(
            "the tokenizer has more tokens than the model",
            got=f"tokenizer {len(tokenizer)}, model {size} ({config.model})",
            why="some prompts would have no embedding",
            fix="use the model's own tokenizer",
        )


def _policy(start: nn.Module, config: TrainConfig, resumed: Path | None, accelerator: Accelerator) -> nn.Module:
    set_seed(config.run.seed)  # adapters start from random numbers: the same on every process
    if config.model.lora_r:
        policy = with_adapter(start, config.model, resumed / "policy" if resumed else None)  # pyright: ignore
    else:
        policy = load_model(str(resumed / "policy"), config.model.dtype) if resumed else start
    if config.model.gradient_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # pyright: ignore
        policy.train()
    return policy.to(accelerator.device)


def _kind(config: TrainConfig) -> str:
    """`none`, `frozen` or `adapter_off`."""
    if config.kl.beta == 0 and config.kl.controller_name == "fixed":
        return "none"
    asked = config.kl.reference
    if asked == "adapter_off" and not config.model.lora_r:
        raise ConfigError(
            "reference='adapter_off' needs an adapter",
            got="lora_r=0",
            why="the reference is the policy with its LoRA adapter switched off",
            fix="set lora_r (16 is usual), or reference='frozen'",
        )
    if asked != "auto":
        return asked
    return "adapter_off" if config.model.lora_r and config.model.ref_model is None else "frozen"


def _needs_copy(config: TrainConfig) -> bool:
    return _kind(config) == "frozen" and config.model.ref_model is None


def _reference(
    config: TrainConfig,
    policy: nn.Module,
    copied: nn.Module | None,
    accelerator: Accelerator,
) -> Reference | None:
    kind = _kind(config)
    if kind == "none":
        return None
    if kind == "adapter_off":
        return AdapterOffReference(policy)
    if copied is not None:
        return FrozenReference(copied.to(accelerator.device))
    assert config.model.ref_model is not None
    model = load_model(config.model.ref_model, config.model.dtype)
    given = output_size(model)
    if given != output_size(policy):
        raise ModelError(
            "the reference has another vocabulary than the policy",
            got=f"reference {given}, policy {output_size(policy)}",
            why="log-probabilities of the same token ids would speak of different tokens",
            fix="use a reference of the same model family",
        )
    return FrozenReference(model.to(accelerator.device), name=f"{config.model.ref_model}, frozen")


def make_optimizer(context: Context) -> tuple[AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW on the weights that are trained, and its schedule in steps."""
    optim = context.config.optim
    optimizer = AdamW(
        [p for p in context.policy.parameters() if p.requires_grad],
        lr=optim.learning_rate,
        betas=(optim.adam_beta1, optim.adam_beta2),
        weight_decay=optim.weight_decay,
    )
    name = "constant_with_warmup" if optim.lr_scheduler_type == "constant" else optim.lr_scheduler_type
    schedule = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=min(optim.warmup_steps, context.config.run.max_steps),
        num_training_steps=context.config.run.max_steps,
    )
    return optimizer, schedule  # pyright: ignore[reportReturnType]


__all__ = ["BUILTIN", "build", "choose_folder", "make_accelerator", "make_optimizer"]
