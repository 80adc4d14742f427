"""The reference of a TRL trainer; hidden states of TRL's own passes, and the exact KL computed from them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer import grpo_trainer

from klamp.config import KLConfig
from klamp.core.types import Batch, Direction
from klamp.errors import ConfigError, ModelError
from klamp.hosts.common.coefficient import loss_mask
from klamp.hosts.trl.session import TRLTrainer
from klamp.scoring.model_parts import Predictions, check_whole, divergence, head_of

REF_HIDDEN = "klamp_ref_hidden"
"""In a batch: per row the reference's hidden states [T, H], or None where the exact KL is not measured."""


def own_reference(model: Any, ref_model: Any, args: Any, *, peft: bool) -> nn.Module | None:
    """The reference that klamp must supply, made before TRL patches the policy; None: TRL makes its own."""
    if isinstance(ref_model, str):
        options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
        if isinstance(model, nn.Module):
            options.setdefault("dtype", next(model.parameters()).dtype)
        return grpo_trainer.create_model_from_path(ref_model, **options)
    if ref_model is not None or peft or not isinstance(model, nn.Module):
        return ref_model
    name = str(getattr(model.config, "_name_or_path", None) or "")
    if not name or (_is_path(name) and not Path(name).is_dir()):
        return frozen_copy(model)  # neither a folder that exists nor a name of the Hub
    check_folder(name)  # TRL loads it again by its name
    return None


def _is_path(name: str) -> bool:
    """Whether a name can be a path alone: a name of the Hub is NAME or OWNER/NAME."""
    return name[:1] in (".", "/", "~") or name.count("/") > 1


def check_folder(name: Any) -> None:
    """Refuse a path that does not exist, and a folder that lacks some of the model's weights."""
    info: Any = {}
    if isinstance(name, str) and _is_path(name) and not Path(name).is_dir():
        fix = "check the path, from the folder in which the program runs"
        raise ModelError("there is no model at this path", got=name, why="TRL would look for it on the hub", fix=fix)
    if isinstance(name, str) and Path(name).is_dir():
        with suppress(Exception):  # TRL reports every other fault itself
            load: Any = grpo_trainer.create_model_from_path
            _, info = load(name, device_map="meta", output_loading_info=True)
    check_whole(info, folder=str(name))


def frozen_copy(model: Any) -> nn.Module:
    """A copy of a model in memory, without anything that a trainer attached to the original."""
    split = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not split:
        made = copy.deepcopy(model)
        made.__dict__.pop("forward", None)
        return made
    # what DeepSpeed's ZeRO-3 bound to the original would be copied with it
    with torch.random.fork_rng(devices=[]):  # a run's draws stay what they were
        made = type(model)(copy.deepcopy(model.config))
    with importlib.import_module("deepspeed").zero.GatheredParameters(split):
        made.load_state_dict(model.state_dict())
    return made.to(dtype=split[0].dtype, device=split[0].device)


def prepared_model(trainer: TRLTrainer, model: Any) -> Any:
    """A frozen model, prepared as TRL prepares its reference."""
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
    return placed(trainer, model)


def placed(trainer: TRLTrainer, model: Any) -> Any:
    """A model that is not trained, where and as the trainer's accelerator has it."""
    if trainer.is_deepspeed_enabled:
        return grpo_trainer.prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return grpo_trainer.prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def describe_reference(trainer: TRLTrainer, source: str) -> str:
    """What a TRL trainer scores as the reference, in words; `source`: where a model of its own comes from."""
    if trainer.beta == 0:
        return "none: beta is 0"
    args, policy = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    if trainer.ref_model is None:  # TRL keeps a copy of an adapter that was there before; it switches off a new one
        has_copy = "ref" in getattr(policy, "peft_config", {})
        return "a frozen copy of the starting adapter" if has_copy else "the policy with its adapter off"
    if args.sync_ref_model:
        share, steps = args.ref_model_mixup_alpha, args.ref_model_sync_steps
        return f"{source}, moved by a share of {share:g} towards the policy every {steps} steps"
    return source


def follow_policy(trainer: TRLTrainer) -> None:
    """Let the reference follow the policy, if it should, through TRL's own callback."""
    sync, callbacks = grpo_trainer.SyncRefModelCallback, trainer.callback_handler.callbacks
    if trainer.args.sync_ref_model and not any(isinstance(callback, sync) for callback in callbacks):
        trainer.add_callback(sync(ref_model=trainer.ref_model, accelerator=trainer.accelerator))


def plain_model(trainer: TRLTrainer, model: Any) -> Any:
    """The transformers model under accelerate's and PEFT's wrappers."""
    model = trainer.accelerator.unwrap_model(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_not_exact(trainer: TRLTrainer) -> str:
    """Why this trainer cannot give the exact KL to its reference, in words; "" where it can."""
    if trainer.args.sync_ref_model:
        return "the reference moves between the pass and the loss, and its output head with it"
    return why_no_head(trainer, trainer.model)


def why_no_head(trainer: TRLTrainer, model: Any) -> str:
    """Why a model's hidden states and output head cannot be had in this trainer, in words; "" where they can."""
    if trainer._never_exact:
        return trainer._never_exact
    if weights_are_split(trainer):
        return "the output head is spread over processes"
    model = plain_model(trainer, model)
    head = None if model.base_model is model else head_of(model)
    if head is None:
        return "the model's backbone and plain output head cannot be separated"
    return "" if head.scale == 1 else f"the model multiplies its logits by {head.scale:g}"


def weights_are_split(trainer: TRLTrainer) -> bool:
    """Whether no process has all weights: under FSDP, and under the third stage of DeepSpeed's ZeRO."""
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0
    return trainer.is_fsdp_enabled or stage == 3


def exact_rows(trainer: TRLTrainer, kl: KLConfig | None) -> int:
    """How many completions of a group have their exact KL measured: all if the loss needs it, else one if it can be."""
    if kl is None:
        return 0
    reason = why_not_exact(trainer)
    if "exact" not in (kl.kl_estimator, kl.kl_baseline):
        return 0 if reason else 1
    if reason:
        raise no_sum("kl_estimator" if kl.kl_estimator == "exact" else "kl_baseline", "exact", trainer, reason)
    return trainer.num_generations


def no_sum(field: str, value: str, trainer: TRLTrainer, reason: str) -> ConfigError:
    """The error for a KL that is summed over the vocabulary, of a model without what that needs."""
    return ConfigError(
        f"{field}={value!r} cannot be honoured for this model",
        got=type(trainer.model).__name__,
        why=f"it is summed over the vocabulary from hidden states and output head, and {reason}",
        fix=f"use {field}='k3'",
    )


@contextmanager
def hidden_states(trainer: TRLTrainer, model: Any, *, wanted: bool) -> Iterator[list[Tensor]]:
    """A context that collects the last hidden states of every forward pass of a model, [B, P + T, H] each."""
    states: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    with ExitStack() as hooks:
        if wanted:
            hooks.callback(plain_model(trainer, model).base_model.register_forward_hook(keep).remove)
        yield states


def keep_reference(trainer: TRLTrainer, output: dict[str, Any], hidden: Tensor | None) -> None:
    """Put the reference's hidden states, for the measured rows, into a generation batch."""
    measured, size = trainer._klamp.reference.exact_rows, trainer.num_generations
    if hidden is None or not measured:
        return
    first = trainer.accelerator.process_index * len(hidden)
    is_measured = [(first + row) % size < measured for row in range(len(hidden))]
    output[REF_HIDDEN] = [row.clone() if keep else None for row, keep in zip(hidden, is_measured, strict=True)]


def exact_kl_of(
    trainer: TRLTrainer, inputs: Any, hidden: Tensor | None, *, direction: Direction = "reverse"
) -> tuple[Tensor, Tensor] | None:
    """The exact KL of a batch, 0 where it is not measured, and where it is; with gradient in `hidden`. [B, T] each"""
    ref_hidden = inputs.get(REF_HIDDEN)
    if hidden is None or ref_hidden is None:
        return None
    rows = torch.tensor([states is not None for states in ref_hidden], device=hidden.device)
    where = loss_mask(inputs) & rows[:, None]
    kl = torch.zeros(where.shape, dtype=torch.float32, device=hidden.device)
    if not bool(where.any()):
        return kl, where
    ref_states = torch.stack([states for states in ref_hidden if states is not None])[where[rows]]
    policy_model = plain_model(trainer, trainer.model)
    ref_model = policy_model if trainer.ref_model is None else plain_model(trainer, trainer.ref_model)
    policy, ref = predicted(policy_model, hidden[where]), predicted(ref_model, ref_states)
    values = divergence(policy, ref, temperature=trainer.temperature, direction=direction)
    return kl.masked_scatter(where, values.float()), where


def predicted(model: Any, states: Tensor) -> Predictions:
    """What a model's head makes of hidden states, computed where the head lies."""
    head = head_of(model)
    assert head is not None  # see `why_not_exact`
    return Predictions(values=states.to(device=head.weight.device, dtype=head.weight.dtype), head=head)


def with_exact(trainer: TRLTrainer, batch: Batch, inputs: Any, hidden: Tensor | None) -> Batch:
    """The batch with the exact KL that its loss is made of; `token_penalty` refuses a batch without it."""
    term = trainer._klamp.term
    if "exact" not in (term.value, term.baseline) or "reference" not in batch.anchors:
        return batch
    directions: dict[str, Direction] = {"kl": "reverse"}
    directions |= {"forward_kl": "forward"} if term.gradient == "forward" else {}
    measured = {name: exact_kl_of(trainer, inputs, hidden, direction=way) for name, way in directions.items()}
    return batch.with_anchor("reference", **{name: kl[0] for name, kl in measured.items() if kl is not None})
