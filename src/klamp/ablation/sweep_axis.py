"""Where each arm of a sweep stands in its picture: on a logarithmic axis of beta, or in a list."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_LINES = 6
"""More lines than this over one axis of beta cannot be told apart; the arms are listed instead."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of a sweep's arms on the axis of its picture."""

    of: Mapping[str, tuple[str, float]]
    """Arm -> (line, place); the line is named by what is swept besides beta, "" where that is nothing."""
    ticks: Mapping[float, str]
    """Place on the axis -> its label."""
    over_beta: bool
    """Whether places are logarithms of beta; otherwise they number the arms."""
    gap: float | None = None
    """Where the axis is broken, between beta 0 and the smallest other one; None without both."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The names of the lines, in the order of their arms."""
        return tuple(dict.fromkeys(line for line, _ in self.of.values()))


def places(arms: Mapping[str, Mapping[str, Any]]) -> Places:
    """Where to draw each arm: along beta where at least two betas were swept and little else, otherwise in a list.

    Args:
        arms: name -> the values that were swept.
    """
    others = [name for name in _varied(arms) if name != "beta"]
    lines = {arm: " ".join(f"{name}={values.get(name)}" for name in others) for arm, values in arms.items()}
    if len(set(lines.values())) > MOST_LINES or not _betas(arms):
        count = range(len(arms))
        return Places(
            of={arm: ("", float(place)) for arm, place in zip(arms, count, strict=True)},
            ticks={float(place): arm for arm, place in zip(arms, count, strict=True)},
            over_beta=False,
        )
    at = _logarithmic(sorted({float(values["beta"]) for values in arms.values()}))
    zero = at.get(0.0)
    return Places(
        of={arm: (lines[arm], at[float(values["beta"])]) for arm, values in arms.items()},
        ticks={place: f"{beta:g}" for beta, place in at.items()},
        over_beta=True,
        gap=None if zero is None else (zero + min(place for beta, place in at.items() if beta)) / 2,
    )


def _varied(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The fields whose value differs between the arms."""
    names = dict.fromkeys(name for values in arms.values() for name in values)
    return [name for name in names if len({repr(values.get(name)) for values in arms.values()}) > 1]


def _betas(arms: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether every arm has a positive (or zero) beta, and the betas differ."""
    betas = [values.get("beta") for values in arms.values()]
    known = all(isinstance(beta, int | float) and math.isfinite(beta) and beta >= 0 for beta in betas)
    return known and len(set(betas)) > 1


def _logarithmic(betas: Sequence[float]) -> dict[float, float]:
    """The place of each beta on a logarithmic axis; 0 stands one step left of the smallest."""
    at = {beta: math.log10(beta) for beta in betas if beta > 0}
    if 0.0 in betas:
        spread = (max(at.values()) - min(at.values())) / max(1, len(at) - 1)
        at = {0.0: min(at.values()) - max(0.6, spread), **at}
    return at
