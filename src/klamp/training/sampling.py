"""Sampling completions: transformers' `generate`, with draws that do not depend on how the batch is split.

Each completion of each step has its own row of uniform numbers, drawn from (seed, step). A token is the inverse of the
policy's cumulative distribution at its number. One process or several, one batch or many: the same completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from klamp.training.config import RolloutConfig


@dataclass(frozen=True, kw_only=True)
class Completions:
    """B sampled completions with their prompts; prompts are left-padded, completions right-padded."""

    prompt_ids: Tensor
    """[B, P]"""
    prompt_mask: Tensor
    """[B, P], 1 on tokens."""
    ids: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] bool; True up to and including the end token."""
    sampler_logprobs: Tensor
    """[B, T] log-probability of each token under the distribution it was drawn from; 0 where masked."""
    ended: Tensor
    """[B] bool; False where the length limit cut the completion."""

    def to(self, device: torch.device) -> Completions:
        """The same on another device."""
        return Completions(**{name: x.to(device) for name, x in vars(self).items()})

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The completions as text, without special tokens."""
        kept = [ids[mask].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]
        return tokenizer.batch_decode(kept, skip_special_tokens=True)


class InverseSampler(LogitsProcessor):
    """Draws each sequence's next token at its own uniform number and leaves only that token possible."""

    def __init__(self, uniforms: Tensor, prompt_length: int, rollout: RolloutConfig) -> None:
        self.uniforms, self.prompt_length, self.temperature = uniforms, prompt_length, rollout.temperature
        self.warpers = LogitsProcessorList()
        if rollout.top_k > 0:
            self.warpers.append(TopKLogitsWarper(rollout.top_k))
        if rollout.top_p < 1:
            self.warpers.append(TopPLogitsWarper(rollout.top_p))
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        warped: Tensor = self.warpers(input_ids, scores.float() / self.temperature)  # pyright: ignore
        logprobs = warped.log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        uniform = self.uniforms[:, input_ids.shape[1] - self.prompt_length, None].to(cumulative.device)
        # The last possible token, not the last of the vocabulary, where rounding puts the number past the end.
        limit = torch.minimum(uniform * cumulative[:, -1:], cumulative[:, -1:].nextafter(torch.zeros_like(uniform)))
        token = (cumulative <= limit).sum(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, token))
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter(-1, token, 0.0)


def uniform_numbers(seed: int, step: int, sequences: int, length: int) -> Tensor:
    """The uniform numbers of a whole step, [sequences, length] in float64, the same on every process."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return torch.rand(sequences, length, generator=generator, dtype=torch.float64)


def encode_prompts(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Left-padded ids and mask of the prompts, [B, P] each."""
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return encoded["input_ids"].to(device), encoded["attention_mask"].to(device)  # pyright: ignore


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[None]:
    """Set the model's own generation settings aside: `generate` would mix penalties and bans into ours.

    In evaluation mode, because in training mode gradient checkpointing takes the cache away from under `generate`,
    which then samples from something else than the policy.
    """
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    kept, training = base.generation_config, model.training
    base.generation_config = GenerationConfig()  # pyright: ignore
    model.eval()
    try:
        yield
    finally:
        base.generation_config = kept
        model.train(training)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    rollout: RolloutConfig,
    stop: Sequence[int],
    pad: int,
    uniforms: Tensor | None,
) -> Completions:
    """Completions of the prompts, one each.

    Args:
        model: the policy, unwrapped.
        prompt_ids, prompt_mask: left-padded prompts, [B, P].
        rollout: length limit, temperature, truncation.
        stop: ids that end a completion.
        pad: id of the padding token.
        uniforms: [B, max_completion_length] numbers in [0, 1); None decodes greedily.
    """
    length = rollout.max_completion_length
    sampler = None if uniforms is None else InverseSampler(uniforms, prompt_ids.shape[1], rollout)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=list(stop), pad_token_id=pad, use_cache=True
    )
    with _plain_generation(model):
        out = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([] if sampler is None else [sampler]),
        )
    ids = out[:, prompt_ids.shape[1] :]
    is_end = torch.isin(ids, torch.tensor(list(stop), device=ids.device))
    mask = (is_end.long().cumsum(-1) - is_end.long()) == 0
    logprobs = torch.zeros(ids.shape) if sampler is None else torch.cat(sampler.logprobs, -1).float()
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=torch.where(mask, ids, pad),
        mask=mask,
        sampler_logprobs=torch.where(mask, logprobs.to(ids.device), 0.0),
        ended=(is_end & mask).any(-1),
    )
