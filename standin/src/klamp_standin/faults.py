"""Faults that the stand-in server makes on purpose, to test clients against."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FaultKind: TypeAlias = Literal["drop", "status", "slow", "die", "fail", "nan", "none", "short"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault, and which requests of a route it happens to.

    - `drop`: the connection closes without an answer.
    - `status`: an HTTP error, `status`, instead of an answer.
    - `slow`: the answer comes `seconds` later; where the route answers through a future, the future stays pending.
    - `die`: the server answers nobody any more, this request included.
    - `fail`: the future ends in an error of the server.
    - `nan`: one log-probability of the answer is NaN (`forward_backward`, and the sampled tokens of `asample`).
    - `none`: one of the prompt's log-probabilities, the last, is missing from the answer (`asample`).
    - `short`: the prompt's log-probabilities come without the missing first one, n-1 instead of n (`asample`).
    """

    kind: FaultKind
    """The kind of fault."""
    route: str
    """The last part of the URL, such as `asample`, `forward_backward`, `optim_step`, `create_sampling_session`."""
    after: int = 0
    """How many requests of the route pass before the first fault."""
    times: int | None = 1
    """How many requests the fault happens to; None: all that follow."""
    scoring: bool | None = None
    """For `asample`: True strikes only requests for prompt log-probabilities, False only the others."""
    seconds: float = 0.0
    """How late a slow answer comes, in seconds."""
    status: int = 503
    """The status code of an HTTP error."""


@dataclass
class FaultPlan:
    """The faults of a server, and how many requests each has seen."""

    faults: Sequence[Fault]
    seen: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, faults: Sequence[Fault]) -> None:
        """Use other faults from now on; requests are counted anew."""
        with self.lock:
            self.faults, self.seen = faults, {}

    def strike(self, route: str, *, scoring: bool = False) -> list[Fault]:
        """Count a request, and say which faults happen to it."""
        met: list[Fault] = []
        with self.lock:
            for i, fault in enumerate(self.faults):
                if fault.route != route or (fault.scoring is not None and fault.scoring != scoring):
                    continue
                passed = self.seen.get(i, 0)
                self.seen[i] = passed + 1
                if passed >= fault.after and (fault.times is None or passed < fault.after + fault.times):
                    met.append(fault)
        return met
