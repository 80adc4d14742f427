"""Scores only a random share of the sequences with the reference, and weighs their KL so that its mean is right."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.errors import ConfigError


def sequence_sample(
    sequences: int, share: float, *, generator: torch.Generator | None = None
) -> Float[Tensor, " sequences"]:
    """The weights of a random subset of sequences: 1 / (probability of being chosen), 0 for the others. [B]

    n = max(1, round(share B)) of the B sequences are drawn without replacement, each subset equally likely; the
    weight of those is B / n. For any numbers x_i of the sequences::

        E[sum_i w_i x_i] = sum_i x_i
        Var[sum_i w_i x_i] = B^2 (1/n - 1/B) S^2,   S^2 = sum_i (x_i - mean x)^2 / (B - 1)

    So the loss and its gradient stay what they are in expectation. Their variance grows by that of the subset: with a
    quarter of the sequences, by 3/4 of what a quarter of the batch would have had to itself.

    Args:
        sequences: B, over all processes.
        share: in (0, 1]; 1 gives the weight 1 to all of them.
        generator: draws the subset; the same state gives the same one.

    Raises:
        ConfigError: a share outside (0, 1], or no sequences.

    Source: Horvitz & Thompson 1952, doi:10.1080/01621459.1952.10483446
    """
    if not 0 < share <= 1 or sequences < 1:
        raise ConfigError(
            "share must lie in (0, 1]",
            got=f"share={share}, {sequences} sequences",
            why="at least one sequence must be scored for the rest to be estimated from",
            fix="use 1.0 to score them all",
        )
    count = max(1, round(share * sequences))
    weights = torch.zeros(sequences)
    weights[torch.randperm(sequences, generator=generator)[:count]] = sequences / count
    return weights
