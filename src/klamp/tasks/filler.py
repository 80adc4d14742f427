"""A variant of the built-in task in which completions may hold fillers, which the reward does not see.

    prompt         completion        reward
    47+85=         132               1
    47+85=         ====132           1        fillers do not count, wherever they stand
    47+85=         ===131            0

It exists for one question: does a policy lengthen its completions to lower its KL? So length is free (the reward does
not see fillers), fillers are nothing foreign (the base model writes some before every addition), and there is room for
more of them. The filler is the sign that every prompt ends with, so alphabet and tokenizer are those of the built-in
task; prompts, held-out prompts and the other skills are too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from klamp.errors import ConfigError
from klamp.tasks.arithmetic import MAX_COMPLETION_LENGTH, MAX_MODEL_LENGTH, MAX_PROMPT_LENGTH, arithmetic_task
from klamp.tasks.base import Example, Task, checked
from klamp.tasks.base_model import BaseModelConfig
from klamp.tasks.config import FILLER_TASK, TaskConfig

FILLER = "="
"""The character that the reward does not see."""


def score_without_fillers(example: Example, completion: str) -> float:
    """The reward 1.0 where the completion without its fillers is the answer, else 0.0."""
    return float(completion.replace(FILLER, "") == example.answer)


def filler_task(config: TaskConfig) -> Task:
    """The built-in task with the reward that does not see fillers.

    Args:
        config: its sizes and its seed are used.
    """
    score = checked(score_without_fillers, name=FILLER_TASK)
    return replace(arithmetic_task(config), name=FILLER_TASK, score=score)


def with_fillers(rows: Iterable[tuple[str, str]], *, most: int, seed: int) -> Iterator[tuple[str, str]]:
    """Rows with 0 to `most` fillers before the answer of every addition, all numbers equally often.

    A geometric number has no bound, but leaves greedy decoding a choice between no filler and endlessly many.

    Args:
        rows: (prompt, completion) pairs.
        most: the largest number of fillers.
        seed: of the draw.
    """
    rng = random.Random(f"fillers/{seed}")
    for prompt, completion in rows:
        count = rng.randint(0, most) if "+" in prompt else 0
        yield prompt, FILLER * count + completion


@dataclass(frozen=True, kw_only=True)
class FillerModelConfig(BaseModelConfig):
    """The base model of this variant, trained on rows with fillers.

    Raises:
        ConfigError: a number of fillers that the rows cannot have, and all that `BaseModelConfig` refuses.
    """

    steps: int = 2000
    """Optimizer steps; to look the digits up from behind a varying number of fillers takes longer to learn."""

    most_fillers: int = 8
    """Additions have from 0 to this many fillers before their answer, all numbers equally often."""

    def __post_init__(self) -> None:
        super().__post_init__()
        room = MAX_MODEL_LENGTH - MAX_PROMPT_LENGTH - MAX_COMPLETION_LENGTH
        if not 0 <= self.most_fillers <= room:
            raise ConfigError(
                "the base model cannot hold so many fillers",
                got=f"most_fillers={self.most_fillers}",
                why=f"beside a prompt and its answer there is room for {room}",
                fix=f"set most_fillers between 0 and {room}",
            )

    def rows(self, count: int) -> Iterator[tuple[str, str]]:
        """Draw the first `count` training rows."""
        return with_fillers(super().rows(count), most=self.most_fillers, seed=self.seed)


def builtin_model(task: str) -> BaseModelConfig:
    """The base model that `builtin` stands for in a task: that of the filler task, or the arithmetic one.

    Args:
        task: as `TaskConfig.task`.
    """
    return FillerModelConfig() if task == FILLER_TASK else BaseModelConfig()
