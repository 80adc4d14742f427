"""Micro-batches of TRL in which the completions of a prompt stand together, so that it is run once for them.

TRL shuffles a generation batch and cuts it into micro-batches. Which completions an optimizer step takes stays as it
was drawn; only which of its micro-batches each of them is in changes, where that changes neither loss nor gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer

from klamp.scoring.passes import distinct

OWN_MEAN = ("bnpo",)
"""Loss types that divide by the tokens of a micro-batch: there it counts which completions are together."""

Batch = dict[str, Any]


def applies(trainer: Any) -> bool:
    """Whether a trainer's micro-batches are to be put together anew."""
    fast = trainer._klamp.fast
    return fast is not None and not fast.reason and keeps_sums(trainer)


def keeps_sums(trainer: Any) -> bool:
    """Whether an optimizer step has several micro-batches, and the same loss and gradient however it is cut."""
    steps = (trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps)
    return (
        trainer.args.gradient_accumulation_steps > 1
        and max(steps) % min(steps) == 0  # else some optimizer steps take their rows out of two generation batches
        and trainer._host_class("_compute_loss") is grpo_trainer.GRPOTrainer
        and trainer.loss_type not in OWN_MEAN
        and getattr(trainer, "top_entropy_quantile", 1.0) == 1.0
        and not getattr(trainer, "_entropy_bonus_enabled", False)
        and not getattr(trainer, "aux_loss_enabled", False)
    )


def cut(batches: list[Batch], accumulated: int) -> list[Batch]:
    """Micro-batches of the same sizes, the rows of each optimizer step in the order of their prompts.

    Args:
        batches: as TRL cut them; they come back as they are where a field is no row each.
        accumulated: how many of them an optimizer step takes.
    """
    found: list[Batch] = []
    for first in range(0, len(batches), accumulated):
        part = batches[first : first + accumulated]
        sizes = [len(batch["prompt_ids"]) for batch in part]
        whole = {name: _joined([batch[name] for batch in part], sizes) for name in part[0]}
        if any(value is NotImplemented for value in whole.values()):
            return batches
        order = distinct(whole["prompt_ids"], whole["prompt_mask"])[2].argsort(stable=True)
        found += [{name: _rows(value, rows) for name, value in whole.items()} for rows in order.split(sizes)]
    return found


def _is_of_all(value: Any) -> bool:
    """Whether a field is that of the whole generation batch, not of a row each."""
    return value is None or (isinstance(value, Tensor) and value.ndim == 0)


def _joined(values: list[Any], sizes: list[int]) -> Any:
    """A field of several micro-batches as that of one; NotImplemented where it is none of a row each."""
    first = values[0]
    if _is_of_all(first):
        return first
    # Patches of pictures, for one, are more than rows.
    if not isinstance(first, Tensor | list) or [len(value) for value in values] != sizes:
        return NotImplemented
    if isinstance(first, Tensor):
        return torch.cat(values)
    return [row for value in values for row in value]


def _rows(value: Any, rows: Tensor) -> Any:
    if _is_of_all(value):
        return value
    return value[rows.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in rows.tolist()]
