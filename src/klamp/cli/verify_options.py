"""The options of `klamp verify`."""

from __future__ import annotations

from dataclasses import dataclass

from klamp.verify.answers import SAMPLES


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `klamp verify` was asked for."""

    question: str | None = None
    """direction, importance-sampling, or none."""
    samples: int = SAMPLES
    """Draws per sampled number."""
    seed: int = 0
    """Seed of the draws."""
    model: str | None = None
    """A real model."""
    ref_model: str | None = None
    """Its reference."""
    noise: float = 0.05
    """Relative noise on the weights of a reference that is not given."""
    prompts: str | None = None
    """File of prompts."""
    tokens: int = 16
    """Tokens to sample per prompt."""
