"""Where fast scoring cannot take the place of TRL's own: each reason by name, found from trainer, model or input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from klamp.hosts.common.step_zero import active_dropouts
from klamp.hosts.trl.exact import plain_model, weights_are_split
from klamp.hosts.trl.refusals import liger_bypasses

SCORING = "_get_per_token_logps_and_entropies"
"""The method of TRL's trainer whose place is taken."""


def why_not_fast(trainer: Any) -> str:
    """Why no completion of a trainer can be scored fast, in words; "" where nothing of its settings forbids it."""
    args, models = trainer.args, [each for each in (trainer.model, trainer.ref_model) if each is not None]
    owner = trainer._host_class(SCORING)
    dropouts = sorted({each.name for each in active_dropouts(trainer.accelerator.unwrap_model(trainer.model))})
    rows = [
        (owner is not grpo_trainer.GRPOTrainer, f"{owner.__name__} scores completions in a way of its own"),
        (weights_are_split(trainer), "FSDP or ZeRO-3 splits the weights layer by layer, and processes would run the "
         "layers unequally often"),
        (_sequences_are_split(trainer), "sequences or matrices are split over processes"),
        (args.use_liger_kernel and liger_bypasses(), "the loss is computed in Liger's kernel"),
        (args.torch_compile, "the model is compiled (torch_compile)"),
        (getattr(args, "cast_lm_head_to_fp32", False), "cast_lm_head_to_fp32 gives the head another type than the "
         "hidden states"),
        (any(_on_devices(trainer, model) > 1 for model in models), "the model is spread over several devices"),
        (_adds_tokens(trainer), "the adapter adds virtual tokens to the prompt"),
        (bool(dropouts), f"dropout is on ({', '.join(dropouts)}), and a prompt that is run once would be dropped out "
         "once: set disable_dropout=True, or lora_dropout=0"),
    ]  # fmt: skip
    return next((text for applies, text in rows if applies), "")


def why_not_these(trainer: Any, mask: Tensor, length: int, others: dict[str, Any]) -> str:
    """Why these completions cannot be scored fast, in words; "" where they can.

    Args:
        trainer: whose method was called.
        mask: [B, P + T], 0 on padding.
        length: T.
        others: what the method was asked besides: pictures, types of tokens, a router's loss.
    """
    given = [name for name, value in others.items() if value is not None and value is not False]
    if "compute_aux_loss" in given:
        return "the router's auxiliary loss is made of whole rows, padding included"
    if given:
        return f"the input is more than tokens ({', '.join(given)})"
    if torch.is_grad_enabled() and trainer._entropy_bonus_enabled:
        return "the entropy bonus needs the entropy's gradient"
    tokens = mask.bool()
    prompts, completions = tokens[:, :-length], tokens[:, -length:]
    if bool((prompts[:, :-1] & ~prompts[:, 1:]).any() | (~completions[:, :-1] & completions[:, 1:]).any()):
        return "there is padding amid a prompt or a completion"
    return ""


def _sequences_are_split(trainer: Any) -> bool:
    found = getattr(trainer.accelerator, "parallelism_config", None)
    return any(getattr(found, f"{kind}_enabled", False) for kind in ("cp", "sp", "tp"))


def _on_devices(trainer: Any, model: Any) -> int:
    return len(set((getattr(plain_model(trainer, model), "hf_device_map", None) or {}).values()))


def _adds_tokens(trainer: Any) -> bool:
    adapters = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {})
    return any(getattr(each, "is_prompt_learning", False) for each in adapters.values())
