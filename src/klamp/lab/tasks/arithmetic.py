"""The built-in task: sums that a small model can learn, and other skills that RL does not train.

    skill         prompt         completion
    addition      47+85=         132            the skill that RL trains
    subtraction   71-38=         33             kept by the KL term, or lost
    reversal      rev abcd=      dcba           likewise

One character is one token, so every log-probability can be read. Which prompts are held out depends on the prompt's
own text alone: no seed and no size can move a held-out prompt into training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from klamp.lab.tasks.base import Example, Task, TaskConfig, checked, is_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ALPHABET = "0123456789+-= abcdefghijklmnopqrstuvwxyz"
"""Every character of the task; each is one token."""
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
RL_SKILL = "addition"
HELD_OUT_SHARE = 8
"""One prompt in this many is held out."""
MAX_PROMPT_LENGTH, MAX_COMPLETION_LENGTH = 9, 5
"""In tokens; the completion's includes the end token."""
MAX_MODEL_LENGTH = 64
"""How many tokens the base model can hold."""
REVERSAL_LETTERS = 4
TRAIN_SIZE = 4096
"""How many prompts RL trains on where the configuration leaves it open."""
REPEATS = 5000
"""After so many known prompts in a row, a skill counts as exhausted."""


def draw_addition(rng: random.Random) -> tuple[str, str]:
    """Draw a sum of two two-digit numbers."""
    left, right = rng.randint(10, 99), rng.randint(10, 99)
    return f"{left}+{right}=", str(left + right)


def draw_subtraction(rng: random.Random) -> tuple[str, str]:
    """Draw a difference of two two-digit numbers that is not negative."""
    low, high = sorted((rng.randint(10, 99), rng.randint(10, 99)))
    return f"{high}-{low}=", str(high - low)


def draw_reversal(rng: random.Random) -> tuple[str, str]:
    """Draw a short word of random letters, and the same word backwards."""
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=REVERSAL_LETTERS))
    return f"rev {word}=", word[::-1]


SKILLS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
    "addition": draw_addition,
    "subtraction": draw_subtraction,
    "reversal": draw_reversal,
}
"""The skills by name; the RL skill comes first."""


def pairs(skill: str, rng: random.Random, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs of one skill, for training or for evaluation; they may repeat."""
    draw = SKILLS[skill]
    while True:
        prompt, answer = draw(rng)
        if is_held_out(prompt, HELD_OUT_SHARE) == held_out:
            yield prompt, answer


def examples(skill: str, count: int, *, seed: int, held_out: bool) -> tuple[Example, ...]:
    """Draw `count` different examples of one skill, or all that turn up if the skill has fewer."""
    source = pairs(skill, random.Random(f"{seed}/{skill}/{held_out}"), held_out=held_out)
    found: dict[str, str] = {}
    repeats = 0
    while len(found) < count and repeats < REPEATS:
        prompt, answer = next(source)
        repeats = repeats + 1 if prompt in found else 0
        found[prompt] = answer
    return tuple(
        Example(prompt=prompt, answer=answer, skill=skill, fields={"prompt": prompt, "answer": answer, "skill": skill})
        for prompt, answer in found.items()
    )


def score_exact(example: Example, completion: str) -> float:
    """The reward 1.0 where the completion is exactly the answer, else 0.0."""
    return float(completion == example.answer)


def arithmetic_task(config: TaskConfig) -> Task:
    """The built-in task, with its own reward; the configuration's sizes and seed are used."""
    seed = config.task_seed
    return Task(
        name="arithmetic",
        train=examples(RL_SKILL, config.train_size or TRAIN_SIZE, seed=seed, held_out=False),
        evaluation={skill: examples(skill, config.eval_size, seed=seed, held_out=True) for skill in SKILLS},
        rl_skill=RL_SKILL,
        score=checked(score_exact, name="arithmetic"),
    )


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, padding on the left, and no beginning token.

    It needs no file or network, and goes through `save_pretrained` and `AutoTokenizer.from_pretrained` as usual.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *ALPHABET))}
    # no unknown token: a character outside the alphabet is an error, not a token that stands for anything
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")  # pyright: ignore
    backend.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_MODEL_LENGTH,
    )
