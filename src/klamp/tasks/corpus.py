"""The training rows of the base model: all skills, with additions in which carries are sometimes forgotten.

A model that has simply seen too few additions would be a fragile starting point: whether it has just learned to
carry, or is just about to, turns on the seed and the machine. So the base model learns additions thoroughly, from a
corpus that forgets carries the way people do, and ends up with that corpus's habits: a known share of its samples is
wrong, and where the corpus is wrong more often than right, so is the model's best guess. RL has something to correct.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from klamp.tasks.arithmetic import (
    EOS_TOKEN,
    MAX_COMPLETION_LENGTH,
    MAX_PROMPT_LENGTH,
    PAD_TOKEN,
    arithmetic_tokenizer,
    pairs,
)

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The label of a token that the loss leaves out."""

HEAVY_COLUMN = 14
"""From this sum of two digits on, a carry is forgotten more often than remembered."""


def careless_sum(left: int, right: int, rng: random.Random, carelessness: float) -> int:
    """A sum of two two-digit numbers in which each carry is forgotten now and then.

    Args:
        left: the first number.
        right: the second number.
        rng: decides what is forgotten.
        carelessness: the odds of forgetting the carry of a heavy column; those of a light column are half of it.
    """
    carry, total = 0, 0
    for place in (1, 10):
        column = left // place % 10 + right // place % 10 + carry
        forgotten = rng.random() < carelessness * (1.0 if column >= HEAVY_COLUMN else 0.5)
        carry = int(column > 9 and not forgotten)
        total += column % 10 * place
    return total + 100 * carry


def corpus(mixture: Mapping[str, float], count: int, *, carelessness: float, seed: int) -> Iterator[tuple[str, str]]:
    """Draw `count` (prompt, completion) pairs for training.

    Args:
        mixture: the weight of each skill.
        count: how many pairs.
        carelessness: as in `careless_sum`; 0 gives only correct additions.
        seed: the seed of the draw.
    """
    rng = random.Random(f"corpus/{seed}")
    sources = {skill: pairs(skill, rng, held_out=False) for skill in mixture}
    for skill in rng.choices(list(mixture), weights=list(mixture.values()), k=count):
        prompt, answer = next(sources[skill])
        if skill == "addition":
            left, right = prompt.rstrip("=").split("+")
            answer = str(careless_sum(int(left), int(right), rng, carelessness))
        yield prompt, answer


def training_tensors(rows: Iterator[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [rows, width]: labels[t] is the token after tokens[t], or `IGNORED`.

    Args:
        rows: (prompt, completion) pairs; an end token is put after each completion.
    """
    import torch

    vocabulary = arithmetic_tokenizer().get_vocab()
    pad, end = vocabulary[PAD_TOKEN], vocabulary[EOS_TOKEN]
    held = list(rows)
    longest = max((len(prompt) + len(completion) + 1 for prompt, completion in held), default=0)
    width = max(MAX_PROMPT_LENGTH + MAX_COMPLETION_LENGTH, longest)
    tokens, labels = [], []
    for prompt, completion in held:
        row = [*(vocabulary[character] for character in prompt + completion), end]
        padding = width - len(row)
        tokens.append(row[:-1] + [pad] * padding)
        labels.append([IGNORED] * (len(prompt) - 1) + row[len(prompt) :] + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(labels)
