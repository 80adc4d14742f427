"""Names an expected gradient by the known gradient that it is a multiple of, in every world it was measured in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING_KNOWN = "none of these"

IN_WORDS: Mapping[str, str] = {
    "zero": "zero",
    "reverse": "KL(policy||ref)",
    "forward": "KL(ref||policy)",
    "local": "KL(policy||ref), prefixes held fixed",
    "local_forward": "KL(ref||policy), prefixes held fixed",
    "local_sampled": "KL(policy||ref) at the sampler's prefixes, held fixed",
    "local_sampled_forward": "KL(ref||policy) at the sampler's prefixes, held fixed",
    "reverse - forward": "KL(policy||ref) minus KL(ref||policy)",
    NOTHING_KNOWN: "neither KL",
}
"""Name of a known gradient -> the divergence whose gradient it is."""


class Followed(NamedTuple):
    """A known gradient and a factor: what a measured gradient turned out to be.

    Attributes:
        name: a name of `truths`, "zero", or "none of these".
        factor: the multiple; -1 is the same gradient with the wrong sign. 0 where the name is "zero".
    """

    name: str
    factor: float

    def is_exactly(self, name: str, *, factor: float = 1.0, tolerance: float = 1e-6) -> bool:
        """Whether it is this known gradient times this factor; the opposite sign is not."""
        if name in ("zero", NOTHING_KNOWN):
            return self.name == name
        return self.name == name and abs(self.factor - factor) <= tolerance

    @property
    def in_words(self) -> str:
        """The name as text: `KL(policy||ref)`, `minus KL(policy||ref)`, `0.5 x KL(policy||ref)` or `zero`."""
        words = IN_WORDS.get(self.name, self.name)
        if self.name in ("zero", NOTHING_KNOWN) or abs(self.factor - 1) < 1e-6:
            return words
        return f"minus {words}" if abs(self.factor + 1) < 1e-6 else f"{self.factor:.4g} x {words}"


def name_gradient(
    gradients: Sequence[Tensor], truths: Sequence[Mapping[str, Tensor]], *, tolerance: float = 1e-7
) -> Followed:
    """Finds the known gradient that the measured ones are a multiple of, with the same factor in all worlds.

    Args:
        gradients: the measured gradient of each world.
        truths: the known gradients of each world, under the same names; "reverse" must be among them.
        tolerance: largest relative distance that still counts as the same.
    """
    measured = _joined(gradients)
    if measured.norm() <= tolerance * _joined([each["reverse"] for each in truths]).norm():
        return Followed("zero", 0.0)
    for name in truths[0]:
        if name == "zero":
            continue
        known = _joined([each[name] for each in truths])
        factor = (measured @ known) / (known @ known)
        if (measured - factor * known).norm() <= tolerance * measured.norm():
            return Followed(name, factor.item())
    return Followed(NOTHING_KNOWN, 0.0)


def cosine(gradients: Sequence[Tensor], known: Sequence[Tensor]) -> float:
    """The cosine of the angle between measured and known gradients, joined over all worlds; 0 where either is zero."""
    a, b = _joined(gradients), _joined(known)
    size = a.norm() * b.norm()
    return (a @ b / size).item() if size > 0 else 0.0


def share(gradients: Sequence[Tensor], known: Sequence[Tensor]) -> float:
    """The multiple of the known gradient that is nearest to the measured one: 1 all of it, 0 none, -1 the opposite."""
    a, b = _joined(gradients), _joined(known)
    return ((a @ b) / (b @ b)).item()


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])
