"""Scores completions in the plainest way: one forward pass, whole rows of logits.

`klamp.scoring.scorer` gives the same numbers for less; this is what it is held against, and what one reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from klamp.diagnostics.statistics import pad_tokens
from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import Predictions, takes


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The log-probabilities (and more) of B completions of T tokens under a model."""

    logprobs: Tensor
    """[B, T] log-probabilities of the completions' tokens, in nats; arbitrary where masked."""
    logits: Tensor | None = None
    """[B, T, V] at the sampling temperature, in float32, where they are held at all."""
    entropy: Tensor | None = None
    """[B, T] in nats, detached; None where nobody asked for it."""
    exact: Tensor | None = None
    """[B, T] exact KL(policy||ref) in nats; 0 where it is not measured."""
    exact_forward: Tensor | None = None
    """[B, T] exact KL(ref||policy) in nats; 0 where it is not measured."""
    predictions: Predictions | None = None
    """[R, T, ...] predictions for the rows that were asked for."""

    def rows(self, part: slice) -> Scores:
        """The scores of some rows, without logits and predictions."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[part]

        return Scores(
            logprobs=self.logprobs[part],
            entropy=cut(self.entropy),
            exact=cut(self.exact),
            exact_forward=cut(self.exact_forward),
        )


def score(model: nn.Module, completions: Completions, *, temperature: float) -> Scores:
    """Score completions with gradient (wrap in `torch.no_grad()` where none is wanted).

    Equation: log softmax(logits / temperature) at each token of the completion.

    Args:
        model: any causal LM; wrapped (DDP, LoRA) or not.
        completions: B completions of T tokens.
        temperature: that of the sampler, so that policy, reference and sampler speak of the same distribution.
    """
    ids = torch.cat([completions.prompt_ids, completions.ids], dim=1)
    mask = torch.cat([completions.prompt_mask, completions.mask.to(completions.prompt_mask.dtype)], dim=1)
    length = completions.ids.shape[1]
    options: dict[str, object] = {"use_cache": False}
    inner = getattr(model, "module", model)
    if takes(inner, "position_ids"):
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if takes(inner, "logits_to_keep"):
        options["logits_to_keep"] = length + 1
    logits = model(input_ids=ids, attention_mask=mask, **options).logits
    logits = logits[:, -length - 1 : -1].float() / temperature
    chosen = logits.gather(-1, completions.ids.unsqueeze(-1)).squeeze(-1)
    return Scores(logits=logits, logprobs=chosen - logits.logsumexp(-1))


def joined(parts: Sequence[Scores], length: int) -> Scores:
    """The detached scores of consecutive parts as one, [B, length], without logits and predictions."""

    def whole(name: str) -> Tensor | None:
        found: list[Tensor | None] = [getattr(part, name) for part in parts]
        if all(x is None for x in found):
            return None
        shapes = [part.logprobs for part in parts]
        given = [torch.zeros_like(like) if x is None else x for x, like in zip(found, shapes, strict=True)]
        return torch.cat([pad_tokens(x.detach(), length) for x in given])

    logprobs = torch.cat([pad_tokens(part.logprobs.detach(), length) for part in parts])
    return Scores(
        logprobs=logprobs, entropy=whole("entropy"), exact=whole("exact"), exact_forward=whole("exact_forward")
    )
