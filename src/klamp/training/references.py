"""Where the reference's log-probabilities come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn

from klamp.training.sampling import Completions
from klamp.training.scoring import Scores, score


class Reference(Protocol):
    """Scores completions without gradient; `describe` says in words where it comes from."""

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """What the reference says about the completions."""
        ...

    def sampling_model(self) -> AbstractContextManager[nn.Module]:
        """The reference as a model that can generate, for as long as the context lasts."""
        ...

    def describe(self) -> str:
        """Where it comes from, in words."""
        ...


class FrozenReference:
    """A model of its own that never changes: exact and simple, at the memory of a second model."""

    def __init__(self, model: nn.Module, *, name: str = "a frozen copy of the starting policy") -> None:
        self.model = model.requires_grad_(False).eval()
        self.name = name

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """What the frozen model says about the completions."""
        return score(self.model, completions, temperature=temperature)

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """The frozen model itself."""
        yield self.model

    def describe(self) -> str:
        """Where it comes from, in words."""
        return self.name


class AdapterOffReference:
    """The policy with its LoRA adapter switched off: no memory of its own."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """What the base model under the adapter says about the completions."""
        with self.sampling_model() as model:
            return score(model, completions, temperature=temperature)

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """The policy, while its adapter is off."""
        off: AbstractContextManager[None] = self.policy.disable_adapter()  # pyright: ignore[reportCallIssue]
        with off:
            yield self.policy

    def describe(self) -> str:
        """Where it comes from, in words."""
        return "the policy with its adapter off"
