"""The reference of a TRL trainer: TRL's own, a model that the caller gives, or a copy in memory."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from trl.trainer import grpo_trainer

from klamp.errors import ConfigError, ModelError
from klamp.scoring.model_parts import check_whole


def own_reference(model: Any, ref_model: Any, args: Any, *, peft: bool) -> nn.Module | None:
    """The reference that klamp must supply, made before TRL patches the policy; None where TRL makes its own.

    Args:
        model: what the trainer is built with, a model or a name.
        ref_model: what the caller passes as the reference: a model, a name or folder, or None.
        args: how TRL loads models.
        peft: whether the policy is or will be a PEFT model, whose reference is the model without its adapter.

    Raises:
        ModelError: the reference is the policy itself, or not all of its weights are where TRL would load it.
    """
    if isinstance(ref_model, str):
        options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        if isinstance(model, nn.Module):
            options.setdefault("dtype", next(model.parameters()).dtype)
        return grpo_trainer.create_model_from_path(ref_model, **options)
    if ref_model is not None and ref_model is model:
        raise ModelError(
            "the reference is the policy itself",
            got=type(model).__name__,
            why="it would be trained along, and the KL would be 0 for ever",
            fix="pass ref_model=copy.deepcopy(model)",
        )
    if ref_model is None and not peft and isinstance(model, nn.Module) and not _can_be_loaded_again(model):
        return frozen_copy(model)
    if ref_model is None and not peft and isinstance(model, nn.Module):  # TRL loads it again by its name
        check_folder(cast(Any, model.config)._name_or_path)
    return ref_model


def check_folder(name: Any) -> None:
    """Refuse a folder that TRL is about to load and that lacks some of the model's weights; all else is let be.

    Raises:
        ModelError: names the tensors.
    """
    found: Any = {}
    if isinstance(name, str) and Path(name).is_dir():
        with suppress(Exception):  # whatever else is wrong with it, TRL says so in its own words
            load: Any = grpo_trainer.create_model_from_path
            _, found = load(name, device_map="meta", output_loading_info=True)
    check_whole(found, folder=str(name))


def _can_be_loaded_again(model: Any) -> bool:
    """Whether the name that the model carries is a folder that exists, or looks like one of the Hub."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    hub = bool(name) and not name.startswith((".", "/", "~")) and name.count("/") <= 1
    return hub or Path(name).is_dir() if name else False


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of a model in memory, without anything that a trainer attached to the original."""
    if _split_weights(model):  # what ZeRO-3 bound to the original would be copied with it
        return fresh_copy(model)
    made = copy.deepcopy(model)
    made.__dict__.pop("forward", None)
    return made


def fresh_copy(model: Any) -> nn.Module:
    """A newly built model with the same class and weights, for a policy that TRL or DeepSpeed has changed already."""
    with torch.random.fork_rng(devices=[]):  # a run's draws stay what they were
        made = type(model)(copy.deepcopy(model.config))
    with whole_weights(model):
        made.load_state_dict(model.state_dict())
    return made.to(dtype=next(model.parameters()).dtype, device=next(model.parameters()).device)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """A context in which each process holds all weights of a model, though DeepSpeed's ZeRO-3 splits them."""
    split = _split_weights(model)
    if not split:
        yield
        return
    with importlib.import_module("deepspeed").zero.GatheredParameters(split):
        yield


def _split_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that ZeRO-3 splits: it gives each a number of its own."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]


def install_reference(trainer: Any, model: Any, *, dtype: str | None) -> None:
    """Make a model the trainer's reference, prepared as TRL prepares its own.

    Raises:
        ConfigError: an option of TRL that can only be applied where TRL loads the reference itself.
    """
    if dtype is not None:
        model.to(getattr(torch, dtype))
    trainer.ref_model = prepared_model(trainer, model)


def prepared_model(trainer: Any, model: Any) -> Any:
    """A frozen model, prepared as TRL prepares its reference.

    Raises:
        ConfigError: an option of TRL that can only be applied where TRL loads the model itself.
    """
    args = trainer.args
    model.requires_grad_(False).eval()
    if args.disable_dropout:
        grpo_trainer.disable_dropout_in_model(model)
    fuse = getattr(grpo_trainer, "add_fused_lm_head", None)
    if fuse is not None:
        fuse(model, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    elif args.cast_lm_head_to_fp32:
        raise ConfigError(
            "cast_lm_head_to_fp32 cannot be combined with a model that klamp brings, in this version of TRL",
            why="the cast is part of how TRL loads its own reference",
            fix="save the reference to a folder and build the model from it, or use trl>=1.14",
        )
    if trainer.is_deepspeed_enabled:
        return grpo_trainer.prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return grpo_trainer.prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def without_a_model(policy: Any) -> str:
    """What TRL scores as the reference where it has no model of its own, in words.

    Of an adapter that was there before, TRL keeps a frozen copy named `ref`; a new one it switches off.
    """
    kept = "ref" in getattr(policy, "peft_config", {})
    return "a frozen copy of the starting adapter" if kept else "the policy with its adapter off"


def follow_policy(trainer: Any) -> None:
    """Let the reference follow the policy, if it should, through TRL's own callback."""
    callbacks = trainer.callback_handler.callbacks
    if trainer.args.sync_ref_model and not any(isinstance(c, grpo_trainer.SyncRefModelCallback) for c in callbacks):
        trainer.add_callback(
            grpo_trainer.SyncRefModelCallback(ref_model=trainer.ref_model, accelerator=trainer.accelerator)
        )
