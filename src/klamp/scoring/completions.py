"""Completions with their prompts, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Completions:
    """B sampled completions [B, T], padded on the right, with their prompts [B, P], padded on the left."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    """1 on tokens, 0 on padding."""
    ids: Tensor
    mask: Tensor
    """[B, T] bool; True up to and including the end token."""
    sampler_logprobs: Tensor
    """[B, T] log-probability of each token under the distribution it was drawn from; 0 where masked."""
    ended: Tensor
    """[B] bool; False where the length limit cut the completion."""

    def to(self, device: torch.device) -> Completions:
        """The same completions on another device."""
        return Completions(**{name: x.to(device) for name, x in vars(self).items()})

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The completions as text, without special tokens."""
        return tokenizer.batch_decode(kept_ids(self.ids, self.mask), skip_special_tokens=True)


def kept_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The ids of each row without its padding."""
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def select(completions: Completions, rows: Tensor | slice) -> Completions:
    """Some of the completions; positions that are padding in all of them are cut off."""
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
