"""Histories from a few curves."""

from collections.abc import Sequence
from typing import Any

import torch

from klamp.doctor.alarm import Evidence
from klamp.doctor.alarms import ALARMS
from klamp.doctor.history import Completion, History, Row, RunSettings

NAMES = {"k1": "kl/k1", "k3": "kl/k3", "exact": "kl/exact", "length": "length/mean", "reward": "reward"}


def history_of(
    *,
    first: int = 1,
    settings: RunSettings | None = None,
    written: Sequence[Completion] = (),
    **curves: Sequence[float],
) -> History:
    """A run whose metrics follow the curves, with completions; short names for the usual ones, `__` for a slash."""
    steps = max(map(len, curves.values()), default=0)
    named = {NAMES.get(name, name.replace("__", "/")): curve for name, curve in curves.items()}
    history = History(settings=settings or RunSettings())
    for i in range(steps):
        metrics = {name: float(curve[i]) for name, curve in named.items() if i < len(curve)}
        history.rows.append(Row(step=first + i, metrics=metrics))
    history.add_completions(written)
    return history


def noisy(level: float, steps: int, *, scale: float, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return (level + scale * torch.randn(steps, generator=generator, dtype=torch.float64)).tolist()


def look(name: str, history: History) -> Evidence | None:
    """What an alarm says of a run as it stands."""
    return ALARMS[name].rule(history)


def rises(name: str, **run: Any) -> bool:
    """Whether an alarm is raised in such a run."""
    return look(name, history_of(**run)) is not None


def steps_of(name: str, history: History) -> list[int]:
    """The steps of a run at which an alarm is raised."""
    return [view.step for view in history.replay() if look(name, view)]


def completion(step: int = 1, **changes: Any) -> Completion:
    """Three tokens, the policy at its reference."""
    values: dict[str, Any] = {"tokens": ("4", "2", "<eos>"), "policy": (-1.0, -2.0, -0.5), "ref": (-1.0, -2.0, -0.5)}
    return Completion(step=step, **values | changes)
