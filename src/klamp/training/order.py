"""The order in which prompts are trained on: it follows from the seed and the number of the step alone."""

from __future__ import annotations

import torch


def examples_of_step(step: int, rows: int, *, size: int, seed: int) -> list[int]:
    """The rows of a step's prompts: consecutive slices of a fresh order in every epoch.

    Args:
        step: number of the step, from 0.
        rows: how many prompts there are.
        size: prompts per step.
        seed: of the run.
    """
    picked: list[int] = []
    position = step * size
    while len(picked) < size:
        epoch, offset = divmod(position + len(picked), rows)
        generator = torch.Generator().manual_seed((seed * 7919 + epoch) % 2**63)
        order = torch.randperm(rows, generator=generator)[offset:].tolist()
        picked += order[: size - len(picked)]
    return picked
