"""What a task is: prompts, held-out prompts, and a reward for each completion.

A task is plain data plus one function. The trainer samples completions for `train`, scores them with `score`, and
evaluates every skill in `evaluation` the same way; it knows nothing about where the rows came from.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from klamp.errors import RewardError, brief

RewardFunction = Callable[["Example", str], Any]
"""An unchecked reward: an example and the text of one completion give a number."""

_SHOWN_CHARACTERS = 200
"""How much of a prompt or completion an error message quotes."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, and all that is needed to score a completion of it."""

    prompt: str
    """The text that is tokenized as it stands; a chat template, where one is used, is already applied."""

    answer: str = ""
    """The ground truth; "" where there is none."""

    skill: str = "task"
    """The row of the evaluation table that this example counts towards."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """The whole data row; reward functions get it as keyword arguments."""

    reference_length: int | None = None
    """The length in tokens that KL budgets assume for this prompt; None where the data does not say."""

    @property
    def question(self) -> str:
        """The prompt as the data has it, without a chat template around it."""
        given = self.fields.get("prompt")
        return given if isinstance(given, str) else self.prompt


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts that RL trains on, the skills that are watched, and the reward."""

    name: str
    """A short name for logs and folders."""

    train: Sequence[Example]
    """The prompts of the RL skill."""

    evaluation: Mapping[str, Sequence[Example]]
    """Held-out examples per skill; the RL skill comes first."""

    rl_skill: str
    """The skill that RL trains; the others show what training costs."""

    score: Callable[[Example, str], float]
    """The reward of one completion, given as text without special tokens; always a finite float."""

    read: frozenset[str] = frozenset()
    """Skills without an answer of the policy: their score is the probability that it gives each token of the example's
    own answer."""


def is_held_out(text: str, share: int) -> bool:
    """Whether a row is kept for evaluation, one in `share`: this depends on its text alone, on no seed and no size."""
    return zlib.crc32(text.encode()) % share == 0


def checked(function: RewardFunction, *, name: str) -> Callable[[Example, str], float]:
    """Wrap a reward function so that it gives a finite float or a clear error.

    A bool counts as 0 or 1, and a number-like scalar (numpy, a tensor of one element) as its value.

    Args:
        function: called as `function(example, completion)`.
        name: how error messages name the function.

    Returns:
        A function of the same signature. It raises RewardError where `function` raised, or returned something that
        is not a finite number.
    """

    def score(example: Example, completion: str) -> float:
        try:
            value = function(example, completion)
        except (RewardError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit, a cancelled task of asyncio
            raise RewardError(
                f"the reward function {name} raised {type(error).__name__}",
                got=f"{error}\n{where(example, completion)}",
                why="a completion without a reward cannot be trained on",
                fix="make the function return a number for every completion, 0 where it cannot be judged",
            ) from error
        return _finite_float(value, name, example, completion)

    return score


def _finite_float(value: Any, name: str, example: Example, completion: str) -> float:
    number = _as_float(value)
    if number is not None and math.isfinite(number):
        return number
    kind = "a number that is not finite" if number is not None else f"{type(value).__name__}, not a number"
    raise RewardError(
        f"the reward function {name} returned {kind}",
        got=f"{_quoted(value)}\n{where(example, completion)}",
        why="one such reward turns the advantages of its whole group into NaN, or stops training later on",
        fix="return a finite int, float or bool for every completion",
    )


def _quoted(value: Any) -> str:
    try:
        return brief(repr(value))
    except Exception as error:  # Python writes no whole number of thousands of digits
        return f"{type(error).__name__}: {error}"


def _as_float(value: Any) -> float | None:
    """The value as a float, or None where it is no real scalar; text never counts as a number."""
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return math.inf
    # numpy and torch scalars: one element, read through their own accessor, so that neither need be imported here
    item = getattr(value, "item", None)
    if item is None or getattr(value, "size", 1) == 0:
        return None
    try:
        scalar = item()
    except (ValueError, RuntimeError, TypeError):
        return None
    return float(scalar) if isinstance(scalar, Real) else None


def where(example: Example, completion: str) -> str:
    """The prompt and the completion that a reward was asked about, as an error quotes them."""
    return f"  prompt: {_short(example.prompt)}\n  completion: {_short(completion)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")
