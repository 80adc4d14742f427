"""Micro-batches of TRL in which the completions of a prompt stand together, so that it is run once for them.

TRL shuffles a generation batch and cuts it into micro-batches. Which completions an optimizer step takes stays as it
was drawn; only which of its micro-batches each of them is in changes, where that changes neither loss nor gradient.
What TRL logs of each micro-batch is that of its own: once a step is scored, its loss measures them again, from scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies of a micro-batch's completions, [B, T] each."""


@dataclass
class Cut:
    """The completions that an optimizer step takes from a generation batch, cut by TRL and by klamp."""

    own: list[Batch]
    """TRL's micro-batches."""
    batches: list[Batch]
    """The same rows in the order of their prompts, in micro-batches of the same sizes."""
    order: Tensor
    """Where each row of `batches` stands among those of `own`; [B]."""
    scores: list[Scores] = field(default_factory=list)
    """Of the micro-batches that the loss was computed of; of `batches`."""

    def own_scores(self) -> list[Scores]:
        """The scores of TRL's micro-batches; the step forgets them, as its next update has others."""
        sizes = [len(batch["prompt_ids"]) for batch in self.own]
        back = self.order.argsort().to(self.scores[0][0].device)
        logprobs, entropies = (torch.cat(each)[back].split(sizes) for each in zip(*self.scores, strict=True))
        self.scores = []
        return list(zip(logprobs, entropies, strict=True))


def cut(batches: list[Batch], accumulated: int) -> list[Cut]:
    """The micro-batches of a generation batch, an optimizer step's together; none where a field is no row each.

    Args:
        batches: as TRL cut them.
        accumulated: how many of them an optimizer step takes.
    """
    found: list[Cut] = []
    for first in range(0, len(batches), accumulated):
        part = batches[first : first + accumulated]
        sizes = [len(batch["prompt_ids"]) for batch in part]
        whole = {name: _joined([batch[name] for batch in part], sizes) for name in part[0]}
        if any(value is NotImplemented for value in whole.values()):
            return []
        order = distinct(whole["prompt_ids"], whole["prompt_mask"])[2].argsort(stable=True)
        rows = order.split(sizes)
        anew = [{name: _rows(value, chosen) for name, value in whole.items()} for chosen in rows]
        found.append(Cut(part, anew, order))
    return found


def present(trainer: Any) -> tuple[Cut, int] | None:
    """The cut that a trainer is at, and the number of the micro-batch in it; None where it takes TRL's own."""
    cuts = trainer._klamp.cuts
    if not (cuts and trainer.model.training):
        return None
    number, place = divmod(trainer._step % trainer.args.steps_per_generation, len(cuts[0].own))
    return cuts[number], place


@contextmanager
def own_metrics(trainer: Any, seen: list[Any], loss: Callable[[Batch], Any]) -> Iterator[None]:
    """A context for a loss: TRL logs what it measures of its own micro-batches, once all of a step are scored.

    Args:
        trainer: with a session.
        seen: the calls of TRL's scoring method inside the loss.
        loss: TRL's loss of a micro-batch.
    """
    at = present(trainer)
    if at is None:
        yield
        return
    step, place = at
    metrics = trainer._metrics["train"]
    before = {name: len(values) for name, values in metrics.items()}
    yield
    for name, values in metrics.items():
        del values[before.get(name, 0) :]
    scores = [(each.logprobs.detach(), each.entropies) for each in seen]  # TRL's loss asks for both
    step.scores = step.scores + scores if place else scores
    if len(step.scores) < len(step.own):
        return
    for batch, known in zip(step.own, step.own_scores(), strict=True):
        with torch.no_grad(), trainer._klamp.knowing(known):
            loss(batch)


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
