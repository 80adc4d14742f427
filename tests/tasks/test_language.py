"""The built-in tasks in English: rewards, held-out rows, skills that are read, options."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hosts.trl.hosts import tokenizer as bpe_tokenizer

from klamp.tasks import Example, TaskConfig, load_task
from klamp.tasks.base import LANGUAGE_TASKS, is_held_out
from klamp.tasks.language import (
    HELD_OUT_SHARE,
    MOST_WORDS,
    happy_words,
    score_contained,
    score_happy,
    score_label,
    words,
)


@pytest.fixture(scope="module")
def chat() -> Any:
    return bpe_tokenizer()


def question(name: str, **options: Any) -> Example:
    return Example(prompt="q", answer=name, **options)


def test_happy_words_are_counted_in_any_case_and_as_whole_words() -> None:
    assert score_happy("A Beautiful, beautiful house; joyful! Joyfully not.") == 3 / 8
    assert score_happy("A Beautiful, beautiful house; joyful!", distinct=True) == 2 / 8
    assert score_happy("unhappy happyness brightly") == 0


@given(st.lists(st.sampled_from([*sorted(happy_words()), "house", "grey", "and"]), max_size=30))
def test_the_reward_is_a_share_of_eight_and_distinct_is_never_more(drawn: list[str]) -> None:
    text = " ".join(drawn)
    happy = [word for word in drawn if word in happy_words()]
    assert score_happy(text) == min(len(happy), 8) / 8
    assert score_happy(text, distinct=True) == min(len(set(happy)), 8) / 8
    assert MOST_WORDS == 8


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("Paris", "The capital of France is Paris.", 1),
        ("Paris", "paris", 1),
        ("Paris", "Parisian life", 0),
        ("small|little|tiny", 'The opposite of "big" is "Little".', 1),
        ("small|little|tiny", "It is smaller.", 0),
        ("N'Djamena", "It is N'Djamena, in Chad", 1),
        ("Port of Spain", "port of spain", 1),
        ("Port of Spain", "Spain has a port", 0),
    ],
)
def test_an_answer_is_a_whole_word(answer: str, completion: str, score: int) -> None:
    assert score_contained(question(answer), completion) == score


@pytest.mark.parametrize(
    ("completion", "score"), [("Positive", 1), (" positive.\n", 1), ("It is positive", 0), ("", 0)]
)
def test_a_label_is_the_whole_completion(completion: str, score: int) -> None:
    assert score_label(question("positive"), completion) == score


def test_word_lists_are_clean() -> None:
    for name in ("things.txt", "happy.txt", "capitals.tsv", "opposites.tsv", "sentiment.tsv", "own-answers.tsv"):
        rows = words(name)
        assert all(cell == cell.strip() and cell for row in rows for cell in row), name
        assert len({row[0].lower() for row in rows}) == len(rows), name
        assert {len(row) for row in rows} == ({1} if name.endswith(".txt") else {2}), name
    assert len(happy_words()) == 60
    assert Counter(label for _, label in words("sentiment.tsv")) == {"positive": 160, "negative": 160}
    for country, capital in words("capitals.tsv"):
        assert not score_contained(question(capital), f"What is the capital of {country}?"), country
    for word, opposite in words("opposites.tsv"):
        assert not score_contained(question(opposite), f'What is the opposite of "{word}"?'), word
    for (thing,) in words("things.txt"):
        assert score_happy(thing) == 0, thing


@pytest.mark.parametrize("name", LANGUAGE_TASKS)
def test_a_task_holds_out_a_fifth_and_keeps_the_other_skills(name: str, chat: Any) -> None:
    task = load_task(TaskConfig(task=name), chat)
    assert task.rl_skill == ("sentiment" if name == "sentiment" else "describe")
    assert list(task.evaluation) == [task.rl_skill, "capitals", "opposites", "own-answers"]
    held_out, trained = task.evaluation[task.rl_skill], task.train
    assert not {e.prompt for e in held_out} & {e.prompt for e in trained}
    assert all(is_held_out(e.fields["prompt"], HELD_OUT_SHARE) for e in held_out)
    assert 0.12 < len(held_out) / (len(held_out) + len(trained)) < 0.28
    assert task.read == {"own-answers"} and all(e.answer for e in task.evaluation["own-answers"])
    assert task.name == name


def test_sizes_and_seed_choose_rows(chat: Any) -> None:
    small = load_task(TaskConfig(task="describe", train_size=10, eval_size=7), chat)
    assert len(small.train) == 10 and {len(rows) for rows in small.evaluation.values()} == {7}
    again = load_task(TaskConfig(task="describe", train_size=10, eval_size=7), chat)
    other = load_task(TaskConfig(task="describe", train_size=10, eval_size=7, task_seed=1), chat)
    assert small.train == again.train != other.train


def test_scores_follow_the_skill(chat: Any) -> None:
    task = load_task(TaskConfig(task="describe-distinct", eval_size=1), chat)
    (describe,), (capital,) = task.evaluation["describe"], task.evaluation["capitals"]
    assert task.score(describe, "happy happy joyful") == 2 / 8
    assert load_task(TaskConfig(task="describe"), chat).score(describe, "happy happy joyful") == 3 / 8
    assert task.score(capital, f"I think it is {capital.answer.split('|')[0]}.") == 1
    assert task.score(capital, "happy happy") == 0


def test_prompts_pass_through_the_chat_template(chat: Any) -> None:
    chat.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    try:
        task = load_task(TaskConfig(task="describe", system_prompt="Be brief."), chat)
        assert task.train[0].prompt == f"[system]Be brief.[user]{task.train[0].fields['prompt']}"
        plain = load_task(TaskConfig(task="describe", chat_template=False), chat)
        assert plain.train[0].prompt == plain.train[0].fields["prompt"]
    finally:
        chat.chat_template = None
