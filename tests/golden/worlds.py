"""The tensors of a golden case: completions from a file, and numbers from Python's own generator, in float64.

`random.Random(text).random()` gives the same numbers on every processor and in every version of Python; the
generators of torch and numpy do not promise that.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
SETS: list[dict[str, Any]] = json.loads((FOLDER / "completions.json").read_text("utf-8"))["sets"]
VOCABULARY, GROUP, MAX_LENGTH = 16, 3, 8
PAD, END = 0, 1


@cache
def uniform(name: str, count: int) -> Tensor:
    """`count` numbers between 0 and 1. [count]"""
    generator = random.Random(name)
    return torch.tensor([generator.random() for _ in range(count)], dtype=torch.float64)


def drawn(name: str, *shape: int) -> Tensor:
    """Numbers with mean 0 and standard deviation 1, a sum of three uniform ones."""
    count = torch.Size(shape).numel()
    return (2 * uniform(name, 3 * count).view(3, count).sum(0) - 3).view(shape)


@dataclass(frozen=True, kw_only=True)
class World:
    """Six completions in two groups, right-padded, and the logits of every model at every position."""

    prompts: list[list[int]]
    completions: list[list[int]]
    ids: Tensor
    mask: Tensor
    rewards: Tensor
    logits: dict[str, Tensor]
    """policy (with gradient), old, ref, sampler, teacher. [B, T, V]"""

    def logprobs(self, who: str) -> Tensor:
        """Of the sampled tokens. [B, T]"""
        return self.logits[who].log_softmax(-1).gather(-1, self.ids[..., None])[..., 0]


def world(case: dict[str, Any]) -> World:
    """The tensors of a case; on-policy, the old policy and the sampler are the policy itself."""
    chosen, seed = SETS[case["set"]], case["seed"]
    rows = [torch.tensor(each) for each in chosen["completions"]]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each, dtype=torch.bool) for each in rows], batch_first=True)
    shape = (*ids.shape, VOCABULARY)
    policy = 1.2 * drawn(f"policy {seed}", *shape)
    moved = {"old": 0.15, "sampler": 0.25, "ref": 0.6, "teacher": 0.9}
    logits = {who: policy + size * drawn(f"{who} {seed}", *shape) for who, size in moved.items()}
    if case["on_policy"]:
        logits |= {"old": policy, "sampler": policy}
    return World(
        prompts=chosen["prompts"],
        completions=chosen["completions"],
        ids=ids,
        mask=mask,
        rewards=torch.tensor(chosen["rewards"], dtype=torch.float64),
        logits=logits | {"policy": policy.clone().requires_grad_()},
    )


def summary(loss: Tensor, gradient: Tensor, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """The numbers that are kept of a loss: its value, projections of its gradient, some entries, its metrics."""
    flat = gradient.detach().double().flatten()
    entries = [flat[len(flat) * part // 7].item() for part in (0, 2, 4)]
    dots = [float(flat @ (uniform(name, len(flat)) - 0.5)) for name in ("first", "second")]
    kept = {name: float(value) for name, value in sorted((metrics or {}).items())}
    return {"loss": loss.item(), "gradient": [float(flat.norm()), *dots, *entries]} | (
        {"metrics": kept} if kept else {}
    )


@torch.no_grad()
def fill(model: Any, seed: str, spread: float = 0.35) -> Any:
    """A model whose weights are drawn, in float64."""
    model.double()
    for name, parameter in model.named_parameters():
        scale = 0.1 * spread if "norm" in name else spread
        parameter.copy_(("norm" in name) + scale * drawn(f"{seed} {name}", *parameter.shape))
    return model
