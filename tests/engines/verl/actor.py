"""verl's whole actor loss on a batch of log-probabilities, and the same batch for klamp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from tests.batches import flat_batch
from torch import Tensor
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils import losses

from klamp.core.types import Batch

PER_TOKEN = ("responses", "response_mask", "old_log_probs", "advantages", "ref_log_prob")
UNCLIPPED_BELOW = 1e6
"""verl clips a second time where the advantage is negative; this puts that out of reach."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Completions, tokens at the left: log-probabilities [B, T] under three policies, advantages [B, T]."""

    policy: Tensor
    old: Tensor
    ref: Tensor
    mask: Tensor
    advantages: Tensor

    @classmethod
    def random(cls, rows: int = 6, tokens: int = 5, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Step:
        """Policies that differ by some tenths of a nat, completions of different lengths."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        policy = -1 - normal(rows, tokens).abs()
        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        lengths[0] = tokens
        mask = torch.arange(tokens) < lengths[:, None]
        old, ref = (policy + scale * normal(rows, tokens) for scale in (0.1, 0.5))
        advantages = normal(rows, 1).expand(rows, tokens)
        policy, old, ref = (torch.where(mask, x, 0).clamp(max=0) for x in (policy, old, ref))
        return cls(policy=policy.requires_grad_(), old=old, ref=ref, mask=mask, advantages=advantages * mask)

    def rows(self, some: slice) -> Step:
        """Some of the completions; their log-probabilities are views of the whole's."""
        return replace(self, **{name: value[some] for name, value in vars(self).items()})

    def batch(self) -> Batch:
        """The same in klamp's words; whoever sampled is the old policy."""
        return flat_batch(
            policy_logprobs=self.policy,
            mask=self.mask,
            advantages=self.advantages,
            old_logprobs=self.old,
            ref_logprobs=self.ref,
            sampler_logprobs=self.old,
        )


def actor_loss(
    step: Step,
    *,
    loss_mode: str = "vanilla",
    tokens: int | None = None,
    rows: int | None = None,
    nested: bool = False,
    columns: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """(loss, metrics) of verl's `ppo_loss`; `options` are fields of ActorConfig, `columns` are the driver's.

    `tokens` and `rows` are the counts of the mini-batch, if the step is a part of one. Nested, every token is trained.
    """
    added = dict(columns or {})
    if "advantages" in added:
        step = replace(step, advantages=added.pop("advantages"))
    options = {"clip_ratio_c": UNCLIPPED_BELOW, "policy_loss": PolicyLossConfig(loss_mode=loss_mode), **options}
    config = ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, **options)
    count, _ = step.mask.shape
    prompt = torch.ones(count, 1, dtype=torch.long)
    data = TensorDict(
        {
            "prompts": prompt,
            "responses": torch.zeros_like(step.mask, dtype=torch.long),
            "attention_mask": torch.cat([prompt, step.mask.long()], dim=1),
            "response_mask": step.mask.long(),
            "old_log_probs": step.old,
            "advantages": step.advantages,
            "ref_log_prob": step.ref,
            **added,
        },
        batch_size=[count],
    )
    policy = _without_padding(step)
    if nested:
        policy = torch.nested.as_nested_tensor(list(policy.split((step.mask.sum(1) + 1).tolist())), layout=torch.jagged)
        data = TensorDict(
            {
                "prompts": torch.nested.as_nested_tensor(list(prompt), layout=torch.jagged),
                **{name: _ragged(data[name], step.mask) for name in PER_TOKEN},
                **{name: _ragged(each, step.mask) if each.ndim == 2 else each for name, each in added.items()},
            },
            batch_size=[count],
        )
    for name, value in {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": rows}.items():
        data.set_non_tensor(name, value)
    return losses.ppo_loss(config, {"log_probs": policy}, data)


def _ragged(values: Tensor, mask: Tensor) -> Tensor:
    rows = [row[kept] for row, kept in zip(values, mask, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _without_padding(step: Step) -> Tensor:
    """The flat layout of verl's engines: one prompt token per row, each number one place before its token."""
    return torch.cat(
        [torch.cat([row[kept], row.new_zeros(1)]) for row, kept in zip(step.policy, step.mask, strict=True)]
    )


def gradient(loss: Tensor, step: Step) -> Tensor:
    """d loss / d policy log-probabilities. [B, T]"""
    return torch.autograd.grad(loss, step.policy)[0]
