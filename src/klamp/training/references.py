"""Where the reference's log-probabilities come from.

frozen        a model of its own that never changes
adapter_off   the policy with its LoRA adapter switched off: no weights of its own
ema           a copy that follows the policy slowly
periodic      a copy that becomes the policy every so many steps
remote        another machine, see `klamp.training.remote`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from klamp.training.completions import Completions
from klamp.training.model_parts import Traits
from klamp.training.probe import probe
from klamp.training.scorer import Ask, Scorer
from klamp.training.scoring import Scores


class Reference(Protocol):
    """Scores completions without gradient."""

    def score(self, completions: Completions, *, temperature: float) -> Scores:
        """What the reference says about the completions."""
        ...

    def sampling_model(self) -> AbstractContextManager[nn.Module]:
        """The reference as a model that can generate, for as long as the context lasts."""
        ...

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Told after every step, `step` steps done; a moving reference moves."""
        ...

    def weights(self) -> nn.Module | None:
        """What a checkpoint must hold for the reference to be the same on resume; None if nothing."""
        ...

    def describe(self) -> str:
        """Where it comes from, in words."""
        ...


@runtime_checkable
class LocalReference(Reference, Protocol):
    """A reference whose weights are here: it can return whole distributions, for the exact KL."""

    scorer: Scorer
    """It does the scoring."""

    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """As any reference; in the rows to `keep`, [B] bool, also its predictions."""
        ...


class FrozenReference:
    """A model of its own that never changes: exact and simple, at the memory of a second model.

    It may live on another device or in another data type than the policy; a lower precision shows up as a KL that is
    not 0 at the first step.
    """

    def __init__(
        self, model: nn.Module, *, name: str = "a frozen copy of the starting policy", traits: Traits | None = None
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.scorer = Scorer(self.model, probe(self.model) if traits is None else traits)
        self.name = name

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """What the model says about the completions, on their device; its predictions in the rows to keep."""
        home, away = completions.ids.device, next(self.model.parameters()).device
        kept = None if keep is None else keep.to(away)
        scores = self.scorer(completions.to(away), Ask(temperature=temperature, keep=kept))
        found = None if scores.predictions is None else scores.predictions.to(home)
        return replace(scores, logprobs=scores.logprobs.to(home), predictions=found)

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """The model itself."""
        yield self.model

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Nothing: it never moves."""

    def weights(self) -> nn.Module | None:
        """None: it is loaded again from where it came."""
        return None

    def describe(self) -> str:
        """Where it comes from, in words."""
        return self.name


class MovingReference(FrozenReference):
    """A copy of the policy that moves: by averaging (`decay`), or by becoming the policy every `reset_steps`.

    Equation: ema ref <- decay ref + (1 - decay) policy after every step; periodic ref <- policy.
    A KL to a moving reference does not bound the distance from the start; the trainer logs that one as well.

    Source: EMA-PG arXiv:2602.04417 (ema)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float | None = None,
        reset_steps: int | None = None,
        traits: Traits | None = None,
    ) -> None:
        words = f"with decay {decay:g}" if decay is not None else f"reset to it every {reset_steps} steps"
        super().__init__(model, name=f"a copy that follows the policy, {words}", traits=traits)
        self.decay, self.reset_steps = decay, reset_steps

    @torch.no_grad()
    def after_step(self, policy: nn.Module, step: int) -> None:
        """Move."""
        if self.decay is None and (self.reset_steps is None or step % self.reset_steps):
            return
        share = 1.0 if self.decay is None else 1.0 - self.decay
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine), share)

    def weights(self) -> nn.Module | None:
        """The copy: where it has moved to is found nowhere else."""
        return self.model


class AdapterOffReference:
    """The policy with its LoRA adapter switched off: no memory of its own."""

    def __init__(self, policy: nn.Module, *, traits: Traits | None = None) -> None:
        self.policy = policy
        self.scorer = Scorer(policy, probe(policy) if traits is None else traits)

    @torch.no_grad()
    def score(self, completions: Completions, *, temperature: float, keep: Tensor | None = None) -> Scores:
        """What the base model under the adapter says about the completions; its predictions in the rows to keep."""
        with self.sampling_model():
            return self.scorer(completions, Ask(temperature=temperature, keep=keep))

    @contextmanager
    def sampling_model(self) -> Iterator[nn.Module]:
        """The policy, while its adapter is off."""
        off: AbstractContextManager[None] = self.policy.disable_adapter()  # pyright: ignore[reportCallIssue]
        with off:
            yield self.policy

    def after_step(self, policy: nn.Module, step: int) -> None:
        """Nothing: the base model never moves."""

    def weights(self) -> nn.Module | None:
        """None: it has no weights of its own."""
        return None

    def describe(self) -> str:
        """Where it comes from, in words."""
        return "the policy with its adapter off"
