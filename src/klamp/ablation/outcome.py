"""The outcome of a run of an ablation, and the file that holds it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from klamp.errors import DataError
from klamp.tasks.files import json_of
from klamp.training.whole_files import write_whole

OUTCOME = "outcome.json"
"""The file in a run's folder; it is there once the run is done, or has failed."""

OutcomeState: TypeAlias = Literal["done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run came to: done or failed, its numbers, its scores, its course.

    The numbers that are measured (`klamp.ablation.measure`) are taken on held-out prompts with the same draws in every
    run, against the model that training started from.
    """

    run: str
    """The name of the run, which is that of its folder."""
    arm: str
    """The name of its arm."""
    seed: int
    """The seed of the run."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Field -> value that the arm sets."""
    state: OutcomeState = "done"
    """Whether it was done or failed; of a failed run the reason is in `error`, and the numbers are empty."""
    error: str = ""
    """Why it failed; the first line says what happened."""
    rl_skill: str = ""
    """The skill that was trained; the others are those to be retained."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Skill -> greedy score on held-out prompts before training."""
    after: Mapping[str, float] = field(default_factory=dict)
    """Skill -> greedy score on held-out prompts after training."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Name -> value, for those of `NUMBERS` that the run has."""
    by_step: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The course of training: step, reward, length, kl/k3 where a reference was loaded; thinned where it is long."""


NUMBERS: Mapping[str, str] = {
    "reward": "mean reward of completions sampled from the policy, RL skill",
    "kl/reverse": "exact KL(policy||start) on completions of the policy, RL skill, nats per token",
    "kl/reverse_sequence": "the same, nats per completion",
    "kl/forward": "exact KL(start||policy) on completions of the starting model, RL skill, nats per token",
    "kl/forward_sequence": "the same, nats per completion",
    "kl_retained/reverse": "as kl/reverse, over the prompts of all other skills",
    "kl_retained/reverse_sequence": "the same, nats per completion",
    "kl_retained/forward": "as kl/forward, over the prompts of all other skills",
    "kl_retained/forward_sequence": "the same, nats per completion",
    "length": "mean tokens of the policy's completions, RL skill, end token included",
    "entropy": "mean entropy of the policy on its own completions, RL skill, nats per token",
    "price": "reward that beta takes for one nat of a whole completion, last step (beta/price)",
    "seconds": "wall time of the training steps, without evaluation, saving and measuring",
}
"""Name of a number -> what it says; a run without other skills has no kl_retained."""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome into a run's folder; the file is there completely or not at all.

    Args:
        folder: of the run.
        outcome: what it came to.
    """
    write_whole(folder / OUTCOME, json.dumps(asdict(outcome), indent=2))


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome from a run's folder; None where the run is neither done nor failed.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / OUTCOME
    if not file.exists():
        return None
    try:
        return _checked(Outcome(**json_of(file.read_text(encoding="utf-8"))))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(
            "the outcome of a run cannot be read",
            got=str(file),
            why=f"{type(error).__name__}: {error}",
            fix="delete that file; the same `klamp ablate` command then makes it again",
        ) from error


def _checked(outcome: Outcome) -> Outcome:
    """The outcome, if each of its fields is of its type.

    Raises:
        TypeError: names the first that is not.
    """
    texts = ("run", "arm", "state", "error", "rl_skill")
    scores = ("before", "after", "numbers")
    right = {name: isinstance(getattr(outcome, name), str) for name in texts}
    right |= {"seed": isinstance(outcome.seed, int), "values": isinstance(outcome.values, dict)}
    right |= {name: _are_numbers(getattr(outcome, name), dict) for name in scores}
    by_step = outcome.by_step
    right["by_step"] = isinstance(by_step, dict) and all(_are_numbers(each, list) for each in by_step.values())
    wrong = [name for name, good in right.items() if not good]
    if wrong:
        raise TypeError(f"{wrong[0]} is {reprlib.repr(getattr(outcome, wrong[0]))}")
    return outcome


def _are_numbers(found: Any, kind: type) -> bool:
    """Whether it is a list of numbers, or a dict of them."""
    if not isinstance(found, kind):
        return False
    return all(isinstance(x, int | float) for x in (found.values() if kind is dict else found))
