"""Generation by transformers inside TRL: each distinct prompt is run once, and its completions go on from its cache.

Sampling, its random numbers and its settings stay those of TRL and transformers; a completion differs only where
rounding moves a probability past the number that was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from klamp.hosts.trl.exact import plain_model
from klamp.hosts.trl.fast_scoring import fall_back, replaced
from klamp.scoring.cache import cache_rows
from klamp.scoring.model_parts import OpenedModel, Traits
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
        return inner(**given, **({} if cache is None else {"past_key_values": cache}))

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
