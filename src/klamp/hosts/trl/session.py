"""What klamp keeps beside a TRL trainer, from one call of the trainer to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.core.term import KLTerm
from klamp.errors import UnsupportedVersion
from klamp.hosts.common.control import KLControl
from klamp.hosts.common.window import Window


@dataclass(frozen=True)
class Scoring:
    """One call of TRL's scoring method."""

    model: Any
    positional: tuple[Any, ...]
    options: dict[str, Any]
    logprobs: Tensor
    """[B, T]"""
    hidden: Tensor | None = None
    """[B, T, H] from which the tokens were predicted, where the exact KL is wanted."""


@dataclass
class Session:
    """A trainer's KL."""

    kl: KLConfig | None
    """None: TRL's own KL is left alone; it is measured all the same where there is one."""
    control: KLControl | None
    term: KLTerm
    windows: dict[str, Window]
    """By mode, train and eval."""
    reference: str = ""
    """Where the reference comes from, in words."""
    expected_zero: bool = True
    """Whether policy and reference should be equal before the first update."""
    resumed: bool = False
    exact_rows: int = 0
    """Completions per group whose exact KL is measured."""
    exact_everywhere: bool = False
    """Whether that is all of them."""
    losses: int = 0
    """How many losses went through klamp's hook."""
    lengths: list[int] = field(default_factory=list)
    """Of the last completions of this process, in tokens."""
    scorable: Tensor | None = None
    """Of all processes' last completions: whether any reward function gave a reward."""
    seen: list[Scoring] | None = None
    """The calls of TRL's scoring method, while anybody listens."""

    @classmethod
    def of(cls, kl: KLConfig | None, *, max_length: int) -> Session:
        """A fresh session; `max_length` is the longest completion in tokens."""
        return cls(
            kl=kl,
            control=None if kl is None else KLControl(kl),
            term=KLTerm() if kl is None else kl.build_term(),
            windows={mode: Window(max_length) for mode in ("train", "eval")},
        )

    @contextmanager
    def listening(self) -> Iterator[list[Scoring]]:
        """Collect the calls of TRL's scoring method."""
        outer, self.seen = self.seen, []
        try:
            yield self.seen
        finally:
            self.seen = outer

    def note_rewards(self, completion_ids: list[Any], rewards: Tensor) -> None:
        """Remember the lengths and which completions have a reward."""
        self.lengths = [len(ids) for ids in completion_ids]
        self.scorable = ~torch.isnan(rewards).all(dim=1)


def only_scoring(seen: list[Scoring]) -> Scoring:
    """The one call of TRL's scoring method in a loss.

    Raises:
        UnsupportedVersion: there was none, or more than one.
    """
    if len(seen) != 1:
        raise UnsupportedVersion(
            "the host's loss does not score the policy where klamp looks",
            got=f"{len(seen)} calls of _get_per_token_logps_and_entropies in one loss, where there should be 1",
            why="the KL is computed from the log-probabilities of that call",
            fix="use a TRL in the declared range, and no subclass that scores the policy elsewhere",
        )
    return seen[0]
