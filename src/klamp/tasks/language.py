"""Built-in tasks in English, for a chat model: a reward that is easily exploited, and skills that show what that costs.

    task               trains                                     reward of a completion
    describe           "Describe a cat in one sentence."          happy words in it, up to 8, over 8; repeats count
    describe-distinct  the same                                   likewise, each word once
    sentiment          "Is this sentence positive or negative?"   1 where it is the right word and nothing else

Without a KL a small model soon answers every question, of whatever skill, with one happy word over and over. What RL
does not train shows it: capitals, opposites, and how likely the model still finds its own former answers to general
questions (`own-answers`: the probability per token, one over the perplexity). `sentiment` is the honest counterpart:
its reward has one way to be earned, and a KL has little to protect.

Every word list stands in `klamp/tasks/words`, written for this; `own-answers.tsv` holds the first sentences of
SmolLM2-135M-Instruct's greedy answers, made by scripts/own_answers.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from klamp.tasks.base import DISTINCT_TASK, SENTIMENT_TASK, Example, Task, TaskConfig, checked, is_held_out
from klamp.tasks.prompts import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_WORDS = 8
"""Happy words that earn the whole reward."""

HELD_OUT_SHARE = 5
"""One row in this many is held out, by a hash of its text."""

OWN_ANSWERS = "own-answers"
"""The skill that is read instead of answered."""

_WORD = re.compile(r"[a-z]+")


@cache
def words(name: str) -> tuple[tuple[str, ...], ...]:
    """The rows of a word list, each split at its tabs.

    Args:
        name: of a file in `klamp/tasks/words`.
    """
    lines = (files("klamp.tasks") / "words" / name).read_text(encoding="utf-8").splitlines()
    return tuple(tuple(line.split("\t")) for line in lines)


@cache
def happy_words() -> frozenset[str]:
    """The words that the reward of `describe` counts."""
    return frozenset(word for (word,) in words("happy.txt"))


def score_happy(completion: str, *, distinct: bool = False) -> float:
    """The reward of `describe`: happy words in a text, up to `MOST_WORDS` of them, as a share of these.

    Args:
        completion: any text.
        distinct: count each word once.
    """
    found = [word for word in _WORD.findall(completion.lower()) if word in happy_words()]
    return min(len(set(found) if distinct else found), MOST_WORDS) / MOST_WORDS


def score_contained(example: Example, completion: str) -> float:
    """The score 1.0 where an accepted answer stands in the completion as a whole word (or words), else 0.0."""
    text = completion.lower()
    accepted = (re.escape(answer) for answer in example.answer.lower().split("|"))
    return float(any(re.search(rf"(?<!\w){answer}(?!\w)", text) for answer in accepted))


def score_label(example: Example, completion: str) -> float:
    """The score 1.0 where the completion is the label, in any case and with or without a full stop, else 0.0."""
    return float(completion.strip().rstrip(".").lower() == example.answer)


_SKILLS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "describe": ("things.txt", lambda thing: f"Describe {thing} in one sentence."),
    "sentiment": (
        "sentiment.tsv",
        lambda text: f'Is this sentence positive or negative? Answer with one word.\n\n"{text}"',
    ),
    "capitals": ("capitals.tsv", lambda country: f"What is the capital of {country}?"),
    "opposites": ("opposites.tsv", lambda word: f'What is the opposite of "{word}"?'),
    OWN_ANSWERS: ("own-answers.tsv", str),
}
"""Skill -> its word list, and the question that a row's first column is put into."""

_KEPT = ("capitals", "opposites", OWN_ANSWERS)
"""What RL does not train."""


def language_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """One of the built-in tasks in English.

    Args:
        config: its name, its sizes, its seed, and how prompts are written are used.
        tokenizer: its chat template is used where it has one.
    """
    trained = "sentiment" if config.task == SENTIMENT_TASK else "describe"
    every = {skill: _examples(skill, config, tokenizer) for skill in (trained, *_KEPT)}
    held_out = {each.prompt for each in every[trained] if is_held_out(each.fields["prompt"], HELD_OUT_SHARE)}
    train = [each for each in every[trained] if each.prompt not in held_out]
    evaluation = {**every, trained: [each for each in every[trained] if each.prompt in held_out]}
    return Task(
        name=config.task,
        train=tuple(train[: config.train_size or None]),
        evaluation={skill: tuple(rows[: config.eval_size]) for skill, rows in evaluation.items()},
        rl_skill=trained,
        score=checked(_score(config.task), name=config.task),
        read=frozenset({OWN_ANSWERS}),
    )


def _score(task: str) -> Callable[[Example, str], float]:
    def score(example: Example, completion: str) -> float:
        if example.skill == "describe":
            return score_happy(completion, distinct=task == DISTINCT_TASK)
        return (score_label if example.skill == "sentiment" else score_contained)(example, completion)

    return score


def _examples(skill: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Sequence[Example]:
    """All examples of a skill, in an order of the task's seed."""
    name, question = _SKILLS[skill]
    rows = [(question(first), rest[0] if rest else "") for first, *rest in words(name)]
    random.Random(f"{config.task_seed}/{skill}").shuffle(rows)
    return [
        Example(
            prompt=prompt_text(prompt, config, tokenizer, where=f"{skill}, row {row}"),
            answer=answer,
            skill=skill,
            fields={"prompt": prompt, "answer": answer, "skill": skill},
        )
        for row, (prompt, answer) in enumerate(rows, start=1)
    ]
