"""Computes the exact KL inside TRL, from the hidden states of the forward passes that TRL does anyway.

A hook on the backbone keeps its last hidden states while TRL scores; the sum over the vocabulary is then made without
holding the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from klamp.core.types import Batch, Direction
from klamp.errors import ConfigError
from klamp.hosts.common.coefficient import loss_mask
from klamp.scoring.model_parts import Predictions, divergence, head_of

REF_HIDDEN = "klamp_ref_hidden"
"""In a batch: per row the reference's hidden states [T, H], or None where the exact KL is not measured."""


def plain_model(trainer: Any, model: Any) -> Any:
    """The transformers model under accelerate's and PEFT's wrappers."""
    model = trainer.accelerator.unwrap_model(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_not_exact(trainer: Any) -> str:
    """Why this trainer cannot give the exact KL to its reference, in words; "" where it can."""
    if trainer.args.sync_ref_model:
        return "the reference moves between the pass and the loss, and its output head with it"
    return why_no_head(trainer, trainer.model)


def why_no_head(trainer: Any, model: Any) -> str:
    """Why a model's hidden states and output head cannot be had in this trainer, in words; "" where they can."""
    if trainer._never_exact:
        return trainer._never_exact
    if weights_are_split(trainer):
        return "the output head is spread over processes"
    model = plain_model(trainer, model)
    head = None if model.base_model is model else head_of(model)
    if head is None:
        return "the model has no backbone and plain output head that could be told apart"
    return "" if head.scale == 1 else f"the model multiplies its logits by {head.scale:g}"


def weights_are_split(trainer: Any) -> bool:
    """Whether no process has all weights: under FSDP, and under the third stage of DeepSpeed's ZeRO."""
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0
    return trainer.is_fsdp_enabled or stage == 3


def check_exact(trainer: Any) -> None:
    """Refuse the estimator `exact` where it cannot be had.

    Raises:
        ConfigError: with the reason.
    """
    reason = why_not_exact(trainer)
    if reason:
        raise ConfigError(
            "kl_estimator='exact' cannot be honoured for this model",
            got=type(trainer.model).__name__,
            why=f"it is summed over the vocabulary from hidden states and output head, and {reason}",
            fix="use kl_estimator='k3'",
        )


@contextmanager
def hidden_states(trainer: Any, model: Any, *, wanted: bool) -> Iterator[list[Tensor]]:
    """A context that collects the last hidden states of every forward pass of a model, [B, P + T, H] each."""
    kept: list[Tensor] = []
    if not wanted:
        yield kept
        return

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = plain_model(trainer, model).base_model.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def of_completions(kept: list[Tensor], logprobs: Tensor | None) -> Tensor | None:
    """The hidden states from which the tokens of these log-probabilities [B, T] were predicted, [B, T, H].

    None where none were kept, or where the host scores elsewhere and gives no log-probabilities here (Unsloth's loss).
    """
    return None if not kept or logprobs is None else torch.cat(kept)[:, -logprobs.shape[1] - 1 : -1]


def keep_reference(trainer: Any, output: dict[str, Any], hidden: Tensor | None) -> None:
    """Put the reference's hidden states, for the chosen rows, into a generation batch."""
    session = trainer._klamp
    if hidden is None or not session.exact_rows:
        return
    rows, first = len(hidden), trainer.accelerator.process_index * len(hidden)
    size = trainer.num_generations
    chosen = [(first + row) % size < session.exact_rows for row in range(rows)]
    output[REF_HIDDEN] = [hidden[row].clone() if chosen[row] else None for row in range(rows)]


def exact_kl_of(
    trainer: Any, inputs: Any, hidden: Tensor | None, *, direction: Direction = "reverse"
) -> tuple[Tensor, Tensor] | None:
    """The exact KL of a batch [B, T], 0 where it is not measured, and where it is measured [B, T].

    Args:
        trainer: has both models and the temperature.
        inputs: the batch, with the reference's hidden states.
        hidden: the policy's, [B, T, H]; the KL has its gradient.
        direction: reverse, or forward.
    """
    kept = inputs.get(REF_HIDDEN)
    if hidden is None or kept is None:
        return None
    rows = torch.tensor([states is not None for states in kept], device=hidden.device)
    where = loss_mask(inputs) & rows[:, None]
    whole = torch.zeros(where.shape, dtype=torch.float32, device=hidden.device)
    if not bool(where.any()):
        return whole, where
    ref_states = torch.stack([states for states in kept if states is not None])[where[rows]]
    policy_model = plain_model(trainer, trainer.model)
    ref_model = policy_model if trainer.ref_model is None else plain_model(trainer, trainer.ref_model)
    policy, ref = predicted(policy_model, hidden[where]), predicted(ref_model, ref_states)
    values = divergence(policy, ref, temperature=trainer.temperature, direction=direction)
    return whole.masked_scatter(where, values.float()), where


def predicted(model: Any, states: Tensor) -> Predictions:
    """What a model predicts from hidden states."""
    head = head_of(model)
    assert head is not None  # see `why_not_exact`
    return Predictions(values=states.to(device=head.weight.device, dtype=head.weight.dtype), head=head)


def with_exact(trainer: Any, batch: Batch, inputs: Any, hidden: Tensor | None) -> Batch:
    """The batch with the exact KL that its loss is made of.

    Raises:
        ConfigError: the pass left no hidden states, so that there is none.
    """
    term = trainer._klamp.term
    if term.value != "exact":
        return batch
    found = exact_kl_of(trainer, inputs, hidden)
    if found is None:
        raise ConfigError(
            "the exact KL of a batch could not be computed",
            why="the scoring pass left no hidden states of policy and reference",
            fix="use kl_estimator='k3'",
        )
    forward = exact_kl_of(trainer, inputs, hidden, direction="forward") if term.gradient == "forward" else None
    return replace(batch, exact_kl=found[0], exact_kl_forward=None if forward is None else forward[0])
