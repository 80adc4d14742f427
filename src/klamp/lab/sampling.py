"""Samples completions, with draws that do not depend on how the batch is divided.

Each completion of each step has its own row of uniform numbers, drawn from (seed, step). A token is the inverse of the
policy's cumulative distribution at its number. One batch or many: the same completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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

from klamp.lab.config import RolloutConfig, TrainConfig
from klamp.scoring.completions import Completions, distinct, run_prompts
from klamp.scoring.model_parts import OpenedModel, Traits, cache_rows

DROP_AT = 0.75  # ended completions leave the cache once no more than this share of its rows goes on: copying costs time


def examples_of_step(step: int, rows: int, *, size: int, seed: int) -> list[int]:
    """Which of `rows` prompts a step (from 0) takes: consecutive slices of a fresh order in every epoch."""
    picked: list[int] = []
    while len(picked) < size:
        epoch, offset = divmod(step * size + len(picked), rows)
        generator = torch.Generator().manual_seed((seed * 7919 + epoch) % 2**63)
        order = torch.randperm(rows, generator=generator)[offset:].tolist()
        picked += order[: size - len(picked)]
    return picked


def examples_of_run(config: TrainConfig, rows: int) -> list[int]:
    """The rows of the prompts of all steps of a run, in the order in which an engine of its own is to take them."""
    size, seed = config.rollout.prompts_per_step, config.run.seed
    return [i for step in range(config.run.max_steps) for i in examples_of_step(step, rows, size=size, seed=seed)]


def uniform_numbers(seed: int, step: int, sequences: int, length: int) -> Tensor:
    """The uniform random numbers of a whole step, [sequences, length] float64."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return torch.rand(sequences, length, generator=generator, dtype=torch.float64)


def encode_prompts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, device: torch.device, *, side: str = "left"
) -> tuple[Tensor, Tensor]:
    """The ids and mask of prompts, padded on the left, or of other texts, padded on the right; [B, P] each."""
    options: Any = {"return_tensors": "pt", "padding": True, "padding_side": side, "add_special_tokens": False}
    encoding: Any = tokenizer(list(texts), **options)
    return encoding["input_ids"].to(device), encoding["attention_mask"].to(device)


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[None]:
    """A context in which the model's own generation settings (penalties, forbidden tokens) do not count."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    settings, training = base.generation_config, model.training
    base.generation_config = GenerationConfig()  # pyright: ignore
    model.eval()  # in training mode gradient checkpointing takes the cache away, and other tokens are sampled
    try:
        yield
    finally:
        base.generation_config = settings
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
    traits: Traits | None = None,
) -> Completions:
    """Generate one completion for each prompt: by `decode` if the cache can be shared, else by transformers.

    The prompts are left-padded, [B, P]. `stop`: ids that end a completion. `uniforms`: [B, max_completion_length]
    numbers in [0, 1); None decodes greedily.
    """
    width, length = prompt_ids.shape[1], rollout.max_completion_length
    with _plain_generation(model):
        if traits is not None and traits.sharing != "no" and OpenedModel(model, traits).is_steady(width + length):
            choices: dict[str, Any] = {"rollout": rollout, "stop": stop, "uniforms": uniforms, "traits": traits}
            ids, logprobs = decode(model, prompt_ids, prompt_mask, **choices)
        else:
            sampler = None if uniforms is None else InverseSampler(uniforms, width, rollout)
            ids = model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=prompt_ids,
                attention_mask=prompt_mask,
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=length, eos_token_id=list(stop), pad_token_id=pad, use_cache=True
                ),
                logits_processor=LogitsProcessorList([] if sampler is None else [sampler]),
            )[:, width:]
            logprobs = torch.zeros(ids.shape) if sampler is None else torch.cat(sampler.logprobs, -1).float()
    is_end = torch.isin(ids, torch.tensor(list(stop), device=ids.device))
    mask = (is_end.long().cumsum(-1) - is_end.long()) == 0
    return Completions(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        ids=torch.where(mask, ids, pad),
        mask=mask,
        sampler_logprobs=torch.where(mask, logprobs.to(ids.device), 0.0),
        ended=(is_end & mask).any(-1),
    )


def decode(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    rollout: RolloutConfig,
    stop: Sequence[int],
    uniforms: Tensor | None,
    traits: Traits,
) -> tuple[Tensor, Tensor]:
    """Completions and their log-probabilities, [B, t], t <= length, arbitrary after an end token; see `generate`."""
    opened, device, length = OpenedModel(model, traits), prompt_ids.device, rollout.max_completion_length
    warpers = warpers_of(rollout)
    prefix = run_prompts(opened, *distinct(prompt_ids, prompt_mask))
    values, cache = prefix.last[prefix.which], cache_rows(prefix.cache, prefix.which, room=length)
    ends = torch.tensor(list(stop), device=device)
    ids = torch.zeros(len(prompt_ids), length, dtype=torch.long, device=device)
    logprobs = torch.zeros(ids.shape, device=device)
    rows, going = torch.arange(len(ids), device=device), torch.ones(len(ids), dtype=torch.bool, device=device)
    for t in range(length):
        scores = opened.predictions(values[:, -1]).logits()
        if uniforms is None:
            token = scores.argmax(-1)
        else:
            numbers = uniforms[rows.to(uniforms.device), t]
            token, logprob = draw(scores, numbers, temperature=rollout.temperature, warpers=warpers)
            logprobs[rows, t] = logprob.to(logprobs.dtype)
        ids[rows, t] = token
        going &= ~torch.isin(token, ends)
        left = int(going.sum())
        if left == 0 or t + 1 == length:
            return ids[:, : t + 1], logprobs[:, : t + 1]
        if left <= DROP_AT * len(rows):
            rest = going.nonzero()[:, 0]
            cache.reorder_cache(rest)
            rows, token, going = rows[rest], token[rest], going[rest]
        values, cache = opened.run(token[:, None], prompt_mask[rows], keep=1, cache=cache)
    return ids, logprobs


def warpers_of(rollout: RolloutConfig) -> LogitsProcessorList:
    """The top-p and top-k of a configuration, as transformers' own functions."""
    top_k = [TopKLogitsWarper(rollout.top_k)] if rollout.top_k > 0 else []
    top_p = [TopPLogitsWarper(rollout.top_p)] if rollout.top_p < 1 else []
    return LogitsProcessorList([*top_k, *top_p])


def draw(
    scores: Tensor, uniforms: Tensor, *, temperature: float, warpers: LogitsProcessorList
) -> tuple[Tensor, Tensor]:
    """The next token of each sequence, and its log-probability under the distribution it is drawn from, in nats.

    Equation: the first token at which the cumulative distribution exceeds the uniform number, in float64; the last
    possible one where rounding puts the number past the end.

    Shapes: scores [B, V], uniforms [B] in [0, 1), float64 -> [B], [B].
    """
    scaled = scores.float() if temperature == 1 else scores.float() / temperature
    if len(warpers):
        scaled = warpers(None, scaled)  # pyright: ignore[reportArgumentType]
    top = scaled.amax(-1, keepdim=True)
    cumulative = (scaled - top).exp_().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    at = torch.minimum(uniforms.to(total.device)[:, None] * total, total.nextafter(torch.zeros_like(total)))
    token = torch.searchsorted(cumulative, at, right=True)
    logprob = scaled.gather(-1, token) - top - total.log()
    return token.squeeze(-1), logprob.float().squeeze(-1)


class InverseSampler(LogitsProcessor):
    """A step of transformers' `generate` that draws each next token and makes all others impossible."""

    def __init__(self, uniforms: Tensor, prompt_length: int, rollout: RolloutConfig) -> None:
        self.uniforms, self.prompt_length, self.temperature = uniforms, prompt_length, rollout.temperature
        self.warpers = warpers_of(rollout)
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniforms = self.uniforms[:, input_ids.shape[1] - self.prompt_length]
        token, logprobs = draw(scores, uniforms, temperature=self.temperature, warpers=self.warpers)
        self.logprobs.append(logprobs.unsqueeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, token.unsqueeze(-1), 0.0)
