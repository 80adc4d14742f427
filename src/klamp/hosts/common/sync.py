"""Whose log-probabilities a sampler and a trainer report: the reading of the weights that has the same numbers.

A reading is one way to score the tokens with weights that are known: as one should, without the prompt, with the head
of the start, ... `klamp.hosts.common.sampler_weights` makes them from a model; this module compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from klamp.diagnostics.alarm import number
from klamp.errors import DataError

WEIGHTS = "weights"
"""The reading that is right: these weights, the prompt, the sampling temperature."""
RAW, TRUNCATED, HIDDEN = "temperature 1", "truncated", "prompt hidden"
NO_ADAPTER, START, START_HEAD = "adapter off", "weights of the start", "head of the start"

SAME = 1e-3
"""Mean difference in nats per token within which two numbers are the same; float32 kernels differ by 1e-6."""
COARSE = 0.1
"""Nats per token, mean size, that data types may explain; bfloat16 against float32 was .02 to .07."""
NEARER = 3.0
"""How many times nearer another reading has to be than the right one, to be named."""

OF_SAMPLER: Mapping[str, str] = {
    RAW: "it reports log-probabilities at temperature 1, and draws at another one: ask it for the processed ones",
    TRUNCATED: "it reports the truncated distribution (top-k, top-p): the trainer's is the whole one",
    HIDDEN: "it did not see the prompt",
    NO_ADAPTER: "it has the weights without the adapter: load or merge the adapter before each rollout",
    START: "it has the weights that training started from: they are not synced",
    START_HEAD: "it has the new weights and the output head of the start: a tied head that a reload leaves stale",
}
OF_TRAINER: Mapping[str, str] = {
    RAW: "it scores at temperature 1, and the tokens are drawn at another one",
    TRUNCATED: "it scores under the truncated distribution",
    HIDDEN: "it does not see the prompt, as where the attention mask hides it: nothing learned depends on it",
    NO_ADAPTER: "it scores without the adapter",
    START: "it scores with the weights that training started from",
    START_HEAD: "it scores with the output head of the start",
}
"""Reading -> what it means where the log-probabilities are those of the sampler, or of the trainer."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What one side reports, held against every reading."""

    side: str
    """Whose: sampler or trainer."""
    gaps: Mapping[str, float]
    """Reading -> mean size of the difference, in nats per token."""

    @property
    def nearest(self) -> str:
        """The reading that explains the numbers: another one than the right one only where it is clearly nearer."""
        best = min(self.gaps, key=lambda name: self.gaps[name])
        right = self.gaps[WEIGHTS]
        return best if right > SAME and self.gaps[best] * NEARER < right else WEIGHTS

    @property
    def is_right(self) -> bool:
        """Whether the numbers are those of the weights, as far as data types and kernels allow."""
        return self.nearest == WEIGHTS and self.gaps[WEIGHTS] <= COARSE

    @property
    def text(self) -> str:
        """One sentence about this side."""
        gap, nearest = self.gaps[WEIGHTS], self.nearest
        if nearest != WEIGHTS:
            meaning = (OF_SAMPLER if self.side == "sampler" else OF_TRAINER)[nearest]
            near = number(self.gaps[nearest])
            return f"the {self.side} is {number(gap)} nats per token off, and {near} with '{nearest}': {meaning}"
        if gap <= SAME:
            return f"the {self.side} has the weights' log-probabilities ({number(gap)} nats per token)"
        if gap <= COARSE:
            return f"the {self.side} has them to {number(gap)} nats per token, as other data types or kernels do"
        return f"the {self.side} is {number(gap)} nats per token off, and no reading that was tried explains it"


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What sampler and trainer report of the same tokens."""

    tokens: int
    """How many tokens were compared."""
    sides: tuple[Reported, ...]
    """The sampler, and the trainer where its numbers are there."""

    @property
    def in_sync(self) -> bool:
        """Whether every side has the log-probabilities of the weights."""
        return all(side.is_right for side in self.sides)

    @property
    def text(self) -> str:
        """One line: what is in order, and what is not."""
        return "; ".join(side.text for side in self.sides)

    def __str__(self) -> str:
        return self.text


def compare(reported: Mapping[str, Tensor], readings: Mapping[str, Tensor]) -> SyncReport:
    """Hold what was reported against every reading of the weights.

    Equation: the gap of a reading is the mean of |log p_reported - log p_reading| over tokens where both are finite.

    Shapes: all [N], one number for each token.

    Args:
        reported: side (sampler, trainer) -> its log-probabilities in nats; NaN where there is none.
        readings: reading -> log-probabilities in nats; `WEIGHTS` is among them. NaN where it says nothing.

    Raises:
        DataError: a side has no number at all.
    """
    right = readings[WEIGHTS]
    for side, values in reported.items():
        if not bool((values.isfinite() & right.isfinite()).any()):
            raise DataError(
                f"the {side} reports no log-probability",
                got=f"{len(values)} tokens, none of them with a finite number",
                why="there is nothing to compare",
                fix="let it report the log-probability of each token that it drew",
            )
    sides = tuple(
        Reported(side=side, gaps={name: _gap(values, each) for name, each in readings.items()})
        for side, values in reported.items()
    )
    return SyncReport(tokens=len(right), sides=sides)


def _gap(reported: Tensor, reading: Tensor) -> float:
    both = reported.isfinite() & reading.isfinite()
    return float((reported - reading)[both].abs().mean()) if bool(both.any()) else float("inf")
