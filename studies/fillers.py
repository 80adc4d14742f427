"""A variant of the built-in task in which completions may hold fillers, which the reward does not see.

`python -m studies.fillers` teaches its base model, once, and prints where it is. `klamp train` takes both from there:

    klamp train --model FOLDER --reward studies.fillers:score_without_fillers

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
from dataclasses import dataclass

from klamp.errors import ConfigError
from klamp.tasks.arithmetic import MAX_COMPLETION_LENGTH, MAX_MODEL_LENGTH, MAX_PROMPT_LENGTH
from klamp.tasks.base_model import SEED, BaseModelConfig, base_model_folder, cached_base_model

FILLER = "="
"""The character that the reward does not see."""


REWARD = "studies.fillers:score_without_fillers"
"""The reward by the name that a configuration takes."""


def score_without_fillers(completion: str, answer: str) -> float:
    """The reward 1.0 where the completion without its fillers is the answer, else 0.0."""
    return float(completion.replace(FILLER, "") == answer)


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
        return with_fillers(super().rows(count), most=self.most_fillers, seed=SEED)


def model_folder() -> str:
    """Where the base model is once it has been taught."""
    return str(base_model_folder(FillerModelConfig()))


def teach() -> str:
    """Teach the base model where that has not been done, which takes two minutes; returns its folder."""
    return str(cached_base_model(FillerModelConfig()))


if __name__ == "__main__":
    print(teach())
