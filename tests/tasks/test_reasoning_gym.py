"""reasoning-gym: any dataset by name, scored by its own rules."""

from __future__ import annotations

from typing import Any

import pytest

from klamp.errors import UnknownNameError
from klamp.tasks import Task, TaskConfig, arithmetic_tokenizer, load_task


def load(name: str, tokenizer: Any = None, **options: Any) -> Task:
    options = {"train_size": 20, "eval_size": 5, **options}
    return load_task(TaskConfig(task=f"reasoning_gym:{name}", **options), tokenizer or arithmetic_tokenizer())


def test_a_dataset_by_name() -> None:
    task = load("chain_sum")
    assert (len(task.train), len(task.evaluation["chain_sum"])) == (20, 5)
    assert task.rl_skill == "chain_sum"
    example = task.train[0]
    assert example.fields["question"] == example.prompt
    assert example.fields["metadata"]["source_dataset"] == "chain_sum"
    assert int(example.answer) == eval(example.fields["metadata"]["expression"])


@pytest.mark.parametrize(
    "wrap", ["{}", " {}\n", "<think>so</think> <answer>{}</answer>", "<answer>0</answer><answer> {} </answer>"]
)
def test_the_answer_is_found_with_and_without_tags(wrap: str) -> None:
    task = load("chain_sum")
    example = task.train[0]
    assert task.score(example, wrap.format(example.answer)) == 1.0
    assert task.score(example, wrap.format(int(example.answer) + 1)) < 0.5
    assert task.score(example, "") < 0.5


def test_every_kind_of_scoring_gives_a_number() -> None:
    # a sudoku, a countdown game and a word ladder have scoring rules of their own
    for name in ("mini_sudoku", "countdown", "word_ladder", "simple_equations"):
        task = load(name, train_size=3, eval_size=2)
        for example in task.train:
            assert task.score(example, example.answer) == 1.0
            assert 0.0 <= task.score(example, "I do not know") < 0.5


def test_held_out_rows_stay_whatever_the_size_and_move_with_the_seed() -> None:
    small, large = load("chain_sum"), load("chain_sum", train_size=60)
    assert small.evaluation == large.evaluation
    assert small.train == large.train[:20]
    assert load("chain_sum", task_seed=9).evaluation != small.evaluation
    few = load("coin_flip", train_size=200, eval_size=50)  # with few possible questions, generated rows repeat
    assert {e.prompt for e in few.evaluation["coin_flip"]}.isdisjoint(e.prompt for e in few.train)


def test_chat_template_and_system_prompt_apply() -> None:
    tokenizer = arithmetic_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    example = load("chain_sum", tokenizer, system_prompt="think").train[0]
    assert example.prompt == f"[system]think[user]{example.fields['question']}"
    assert load("chain_sum", tokenizer, chat_template=False).train[0].prompt == example.fields["question"]


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="(?s)unknown reasoning-gym dataset.*did you mean 'chain_sum'"):
        load("chain_sums")
