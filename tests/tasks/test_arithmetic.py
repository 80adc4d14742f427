"""The built-in task: right answers, a split that never leaks, and a tokenizer of one character per token."""

import random
import string
from itertools import islice
from typing import Any

import pytest

from klamp.errors import ConfigError, UnknownNameError
from klamp.lab.tasks import TaskConfig, arithmetic_tokenizer, load_task
from klamp.lab.tasks.arithmetic import (
    ALPHABET,
    HELD_OUT_SHARE,
    MAX_COMPLETION_LENGTH,
    MAX_MODEL_LENGTH,
    MAX_PROMPT_LENGTH,
    RL_SKILL,
    SKILLS,
    examples,
    pairs,
)
from klamp.lab.tasks.base import is_held_out


def expected_answer(prompt: str) -> str:
    """The answer by another way than the task's own: parse the prompt."""
    if prompt.startswith("rev "):
        return "".join(reversed(prompt[4:-1]))
    return str(eval(prompt[:-1]))  # digits, + and - only: these prompts are ours


@pytest.mark.parametrize("skill", SKILLS)
def test_answers_are_right_and_fit_the_declared_lengths(skill: str) -> None:
    for prompt, answer in islice(pairs(skill, random.Random(3), held_out=False), 500):
        assert answer == expected_answer(prompt)
        assert len(prompt) <= MAX_PROMPT_LENGTH
        assert len(answer) + 1 <= MAX_COMPLETION_LENGTH
        assert set(prompt + answer) <= set(ALPHABET)
    assert MAX_PROMPT_LENGTH + MAX_COMPLETION_LENGTH <= MAX_MODEL_LENGTH


@pytest.mark.parametrize("skill", SKILLS)
def test_same_seed_same_examples_and_another_seed_others(skill: str) -> None:
    first = examples(skill, 50, seed=1, held_out=False)
    assert first == examples(skill, 50, seed=1, held_out=False)
    assert first != examples(skill, 50, seed=2, held_out=False)
    assert len({e.prompt for e in first}) == 50
    # a longer draw starts with the shorter one: a bigger run sees the same prompts first
    assert examples(skill, 80, seed=1, held_out=False)[:50] == first


def test_held_out_prompts_never_turn_up_in_training_whatever_the_seed() -> None:
    task = load_task(TaskConfig(train_size=3000, eval_size=200, task_seed=5), arithmetic_tokenizer())
    held_out = {e.prompt for rows in task.evaluation.values() for e in rows}
    for seed in (5, 6):
        train = examples(RL_SKILL, 3000, seed=seed, held_out=False)
        assert held_out.isdisjoint(e.prompt for e in train)
    assert held_out.isdisjoint(e.prompt for e in task.train)
    assert all(is_held_out(prompt, HELD_OUT_SHARE) for prompt in held_out)


def test_the_task_trains_addition_and_watches_the_rest() -> None:
    task = load_task(TaskConfig(train_size=20, eval_size=7), arithmetic_tokenizer())
    assert task.rl_skill == RL_SKILL
    assert list(task.evaluation) == list(SKILLS)
    assert next(iter(task.evaluation)) == RL_SKILL
    assert [len(rows) for rows in task.evaluation.values()] == [7] * len(SKILLS)
    assert {e.skill for e in task.train} == {RL_SKILL}
    assert len(task.train) == 20
    assert len(load_task(TaskConfig(), arithmetic_tokenizer()).train) == 4096


@pytest.mark.parametrize(
    "option",
    [{"system_prompt": "be brief"}, {"eval_split": "held.jsonl"}, {"skill_column": "s"}, {"chat_template": True}],
)
def test_options_that_would_do_nothing_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        load_task(TaskConfig(**option), arithmetic_tokenizer())  # pyright: ignore


def test_a_task_that_there_is_not_and_a_size_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'arithmetic'"):
        load_task(TaskConfig(task="arithmetics"), arithmetic_tokenizer())
    for changes in ({"train_size": -1}, {"eval_size": 0}):
        with pytest.raises(ConfigError):
            TaskConfig(**changes)  # pyright: ignore


def test_one_character_is_one_token_and_text_survives_the_round_trip() -> None:
    tokenizer = arithmetic_tokenizer()
    ids = tokenizer(ALPHABET)["input_ids"]
    assert len(ids) == len(ALPHABET) == len(set(ids))  # pyright: ignore
    for text in ("47+85=", "71-38=", "rev abcd=", "a  b "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text  # pyright: ignore
    assert tokenizer(string.digits + "<eos>")["input_ids"][-1] == tokenizer.eos_token_id  # pyright: ignore
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    padded: Any = [tokenizer.pad_token_id, *ids[:2], tokenizer.eos_token_id]
    assert tokenizer.decode(padded, skip_special_tokens=True) == "01"
