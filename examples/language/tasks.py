"""Tasks in English for a chat model: a reward that is easily exploited, and skills that show what that costs.

    describe           trains "Describe a cat in one sentence."        happy words in it, up to 8, over 8; repeats count
    describe_distinct  the same                                        likewise, each word once
    sentiment          trains "Is this sentence positive or negative?" 1 for the right word and nothing else
    short_answers      questions, and the prompt that a teacher sees for each (examples/language/short-answers.yaml)

    klamp train --model FOLDER --task examples/language/tasks.py:describe

Without a KL a small model soon answers every question, of whatever skill, with one happy word over and over. The skills
that RL does not train show it: capitals, opposites, and how likely the model still finds its own former answers to
general questions (`own-answers`: the probability per token, one over the perplexity).

The word lists were written for these tasks. `own-answers.tsv` holds the first sentences of SmolLM2-135M-Instruct's
greedy answers to `questions.txt`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from klamp.lab.tasks import Example, Task, TaskConfig, rows_task
from klamp.lab.tasks.base import is_held_out
from klamp.lab.tasks.files import prompt_text

WORDS = Path(__file__).resolve().parent / "words"
MOST_WORDS = 8
"""Happy words that earn the whole reward."""
HELD_OUT_SHARE = 5
"""One row in this many is held out, by a hash of its text."""
OWN_ANSWERS = "own-answers"
"""The skill that is read instead of answered."""
BRIEF = "Answer in one short sentence."
"""What the teacher of `short_answers` sees behind each question."""


@cache
def words(name: str) -> tuple[tuple[str, ...], ...]:
    """The rows of a word list, each split at its tabs."""
    return tuple(tuple(line.split("\t")) for line in (WORDS / name).read_text(encoding="utf-8").splitlines())


@cache
def happy_words() -> frozenset[str]:
    """The words that the reward of `describe` counts."""
    return frozenset(word for (word,) in words("happy.txt"))


def score_happy(completion: str, *, distinct: bool = False) -> float:
    """The reward of `describe`: happy words in a text, up to `MOST_WORDS`, as a share of `MOST_WORDS`.

    Args:
        completion: any text.
        distinct: count each word once.
    """
    happy = [word for word in re.findall("[a-z]+", completion.lower()) if word in happy_words()]
    return min(len(set(happy) if distinct else happy), MOST_WORDS) / MOST_WORDS


def score_contained(example: Example, completion: str) -> float:
    """The score 1.0 if an accepted answer is in the completion as a whole word (or words), else 0.0."""
    accepted = (re.escape(answer) for answer in example.answer.lower().split("|"))
    return float(any(re.search(rf"(?<!\w){answer}(?!\w)", completion.lower()) for answer in accepted))


def score_label(example: Example, completion: str) -> float:
    """The score 1.0 if the completion is the label, in any case and with or without a full stop, else 0.0."""
    return float(completion.strip().rstrip(".").lower() == example.answer)


SKILLS: dict[str, tuple[str, Callable[[str], str]]] = {
    "describe": ("things.txt", lambda thing: f"Describe {thing} in one sentence."),
    "sentiment": (
        "sentiment.tsv",
        lambda text: f'Is this sentence positive or negative? Answer with one word.\n\n"{text}"',
    ),
    "capitals": ("capitals.tsv", lambda country: f"What is the capital of {country}?"),
    "opposites": ("opposites.tsv", lambda word: f'What is the opposite of "{word}"?'),
    OWN_ANSWERS: ("own-answers.tsv", str),
}
"""Skill -> its word list, and the question made of a row's first column."""


def describe(config: TaskConfig, tokenizer: Any) -> Task:
    """Happy words in descriptions; repeats count."""
    return _task("describe", lambda _, text: score_happy(text), config, tokenizer)


def describe_distinct(config: TaskConfig, tokenizer: Any) -> Task:
    """Happy words in descriptions, each counted once."""
    return _task("describe", lambda _, text: score_happy(text, distinct=True), config, tokenizer)


def sentiment(config: TaskConfig, tokenizer: Any) -> Task:
    """The right word for a sentence: a reward with one way to earn it."""
    return _task("sentiment", score_label, config, tokenizer)


def short_answers(config: TaskConfig, tokenizer: Any) -> Task:
    """Questions whose teacher is asked to answer in one short sentence (`teacher_prompt: brief`)."""
    things = [(f"What is {thing}?", "things") for (thing,) in words("things.txt")]
    questions = [(question, "questions") for (question,) in words("questions.txt")]
    rows = [{"prompt": q, "brief": f"{q}\n\n{BRIEF}", "skill": skill} for q, skill in things + questions]
    return rows_task(rows, config, tokenizer)


def _task(skill: str, reward: Callable[[Example, str], float], config: TaskConfig, tokenizer: Any) -> Task:
    """A task that trains one skill and evaluates all of them."""
    every = {name: _examples(name, config, tokenizer) for name in (skill, "capitals", "opposites", OWN_ANSWERS)}
    held_out = [each for each in every[skill] if is_held_out(each.fields["prompt"], HELD_OUT_SHARE)]
    train = [each for each in every[skill] if not is_held_out(each.fields["prompt"], HELD_OUT_SHARE)]
    return Task(
        name=config.task.rpartition(":")[2],
        train=tuple(train[: config.train_size or None]),
        evaluation={name: tuple(rows[: config.eval_size]) for name, rows in (every | {skill: held_out}).items()},
        rl_skill=skill,
        score=lambda example, text: (reward if example.skill == skill else score_contained)(example, text),
        read=frozenset({OWN_ANSWERS}),
    )


def _examples(skill: str, config: TaskConfig, tokenizer: Any) -> Sequence[Example]:
    """All examples of a skill, in an order drawn from the task's seed."""
    name, question = SKILLS[skill]
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
