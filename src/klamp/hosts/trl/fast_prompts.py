"""What else fast scoring does once for all completions of a prompt: its pass in generation, and in an optimizer step.

In generation by transformers each distinct prompt is run once, and its completions go on from its cache. Sampling, its
random numbers and its settings stay those of TRL and transformers; a completion differs only where rounding moves a
probability past the number that was drawn.

TRL shuffles a generation batch and cuts it into micro-batches. Which completions an optimizer step takes stays as it
was drawn; only which of its micro-batches each of them is in changes, where that changes neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer import grpo_trainer

from klamp.hosts.trl.exact import plain_model
from klamp.hosts.trl.fast_scoring import fall_back, replaced
from klamp.scoring.model_parts import OpenedModel, Traits, cache_name, cache_rows
from klamp.scoring.passes import distinct, run_prompts
from klamp.scoring.scorer import Scorer

KNOWN = ("disable_compile", "generation_config", "synced_gpus")
"""What `generate` may be asked for besides tokens."""
SETTINGS = ("assistant_early_exit", "cache_implementation", "penalty_alpha", "prompt_lookup_num_tokens")
"""Settings of a generation that bring a cache or a way of decoding of their own."""


@contextmanager
def prompts_once(trainer: Any) -> Iterator[None]:
    """A context in which `generate` of a trainer's model runs each distinct prompt once, where that is possible."""
    fast = trainer._klamp.fast
    causal = None if fast is None or fast.reason else plain_model(trainer, trainer.model)
    traits = None if fast is None or causal is None else fast.traits.get(id(causal))
    if causal is None or traits is None or traits.sharing == "no":
        yield
        return
    inner = causal.generate

    def generate(input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any) -> Any:
        given = {"input_ids": input_ids, "attention_mask": attention_mask} | options
        if input_ids is None or attention_mask is None:
            return inner(**given)
        reason = why_not_once(causal, options)
        if reason:
            fall_back(trainer, reason, what="transformers' own first pass")
        apart = reason or not Scorer(causal, traits).can_share()
        cache = None if apart else _cache_of_prompts(causal, input_ids, attention_mask, options)
        return inner(**given, **({} if cache is None else {cache_name(causal): cache}))

    with replaced(causal, "generate", generate):
        yield


def why_not_once(causal: nn.Module, options: dict[str, Any]) -> str:
    """Why a generation cannot begin with prompts that were run before, in words; "" where it can.

    Args:
        causal: the model.
        options: what `generate` is asked for besides tokens and their mask.
    """
    others = sorted(name for name, value in options.items() if name not in KNOWN and value is not None)
    if others:
        return f"the input is more than tokens ({', '.join(others)})"
    settings = _settings(causal, options)
    own = [name for name in SETTINGS if getattr(settings, name, None) is not None]
    several = max(getattr(settings, name, None) or 1 for name in ("num_beams", "num_return_sequences")) > 1
    if own or several or getattr(settings, "use_cache", None) is False:
        return f"the generation has a cache or a way of decoding of its own ({', '.join(own) or 'beams, no cache'})"
    return ""


def _settings(causal: nn.Module, options: dict[str, Any]) -> Any:
    return options.get("generation_config") or getattr(causal, "generation_config", None)


def _cache_of_prompts(causal: nn.Module, ids: Tensor, mask: Tensor, options: dict[str, Any]) -> Any:
    """The keys and values of all of the prompts but their last token; None where that saves nothing or is not exact.

    `generate` itself runs the last token, for each completion.
    """
    longest = getattr(_settings(causal, options), "max_new_tokens", None) or 1
    opened = OpenedModel(causal, Traits())  # the model as it is called, so that its wrappers count
    if ids.shape[1] < 2 or not opened.is_steady(ids.shape[1] + longest):
        return None
    some, their_mask, which = distinct(ids[:, :-1], mask[:, :-1])
    if len(some) == len(ids):
        return None
    return cache_rows(run_prompts(opened, some, their_mask, which).cache, which, room=longest)


OWN_MEAN = ("bnpo",)
"""Loss types that divide by the tokens of a micro-batch: there it counts which completions are together."""

Batch = dict[str, Any]


def cuts_anew(trainer: Any) -> bool:
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
