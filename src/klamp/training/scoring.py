"""Log-probabilities of completions under a model: the one forward pass that policy and reference share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from klamp.training.models import takes
from klamp.training.sampling import Completions


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model says about B completions."""

    logits: Tensor | None
    """[B, T, V] at the sampling temperature, in float32; None where a remote model keeps them."""
    logprobs: Tensor
    """[B, T] log-probabilities of the completions' tokens; arbitrary where masked."""

    def entropy(self) -> Tensor:
        """Entropy at each prefix in nats, detached. [B, T]"""
        assert self.logits is not None, "a policy has logits"
        logprobs = self.logits.detach().log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)


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


def select(completions: Completions, rows: Tensor | slice) -> Completions:
    """Some of the completions, with positions trimmed that are padding in all of them."""
    mask = completions.mask[rows]
    length = max(1, int(mask.any(0).long().sum()))
    prompt_mask = completions.prompt_mask[rows]
    first = int((prompt_mask.sum(0) == 0).long().sum())
    return Completions(
        prompt_ids=completions.prompt_ids[rows, first:],
        prompt_mask=prompt_mask[:, first:],
        ids=completions.ids[rows, :length],
        mask=mask[:, :length],
        sampler_logprobs=completions.sampler_logprobs[rows, :length],
        ended=completions.ended[rows],
    )
