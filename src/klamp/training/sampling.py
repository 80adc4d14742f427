"""Samples completions, with draws that do not depend on how the batch is divided.

Each completion of each step has its own row of uniform numbers, drawn from (seed, step). A token is the inverse of the
policy's cumulative distribution at its number. One process or several, one batch or many: the same completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from klamp.scoring.completions import Completions
from klamp.scoring.model_parts import OpenedModel, Traits
from klamp.training.config import RolloutConfig
from klamp.training.decoding import decode
from klamp.training.draws import InverseSampler, draw, warpers_of


def uniform_numbers(seed: int, step: int, sequences: int, length: int) -> Tensor:
    """The uniform random numbers of a whole step, [sequences, length] float64, equal on every process."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return torch.rand(sequences, length, generator=generator, dtype=torch.float64)


def encode_prompts(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The ids and mask of the prompts, padded on the left, [B, P] each."""
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return encoded["input_ids"].to(device), encoded["attention_mask"].to(device)  # pyright: ignore


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[None]:
    """A context in which the model's own generation settings (penalties, forbidden tokens) do not count.

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
    traits: Traits | None = None,
) -> Completions:
    """Generate one completion for each prompt.

    With `traits` that say the cache can be shared, equal prompts are run once, and completions that have ended leave
    the batch; otherwise it is `generate` of transformers. The tokens are the same.

    Args:
        model: the policy, unwrapped.
        prompt_ids, prompt_mask: left-padded prompts, [B, P].
        rollout: length limit, temperature, truncation.
        stop: ids that end a completion.
        pad: id of the padding token.
        uniforms: [B, max_completion_length] numbers in [0, 1); None decodes greedily.
        traits: what the model allows; None: nothing is known of it.
    """
    with _plain_generation(model):
        options: dict[str, Any] = {"rollout": rollout, "stop": stop, "uniforms": uniforms}
        longest = prompt_ids.shape[1] + rollout.max_completion_length
        if traits is not None and traits.sharing != "no" and OpenedModel(model, traits).is_steady(longest):
            ids, logprobs = _decoded(model, prompt_ids, prompt_mask, traits=traits, **options)
        else:
            ids, logprobs = _generated(model, prompt_ids, prompt_mask, pad=pad, **options)
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


def _decoded(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    rollout: RolloutConfig,
    stop: Sequence[int],
    uniforms: Tensor | None,
    traits: Traits,
) -> tuple[Tensor, Tensor]:
    warpers = warpers_of(rollout)

    def taken(scores: Tensor, rows: Tensor, t: int) -> tuple[Tensor, Tensor]:
        if uniforms is None:
            return scores.argmax(-1), torch.zeros(len(scores), device=scores.device)
        numbers = uniforms[rows.to(uniforms.device), t]
        return draw(scores, numbers, temperature=rollout.temperature, warpers=warpers)

    length = rollout.max_completion_length
    return decode(model, traits, prompt_ids, prompt_mask, length=length, stop=stop, draw=taken)


def _generated(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    rollout: RolloutConfig,
    stop: Sequence[int],
    pad: int,
    uniforms: Tensor | None,
) -> tuple[Tensor, Tensor]:
    length = rollout.max_completion_length
    sampler = None if uniforms is None else InverseSampler(uniforms, prompt_ids.shape[1], rollout)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=list(stop), pad_token_id=pad, use_cache=True
    )
    out = model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        synced_gpus=False,  # sharded weights are gathered around this, and processes may have no prompts
        generation_config=settings,
        logits_processor=LogitsProcessorList([] if sampler is None else [sampler]),
    )
    ids = out[:, prompt_ids.shape[1] :]
    return ids, torch.zeros(ids.shape) if sampler is None else torch.cat(sampler.logprobs, -1).float()
