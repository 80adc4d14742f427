"""A task of the user's: `module:function` gets the configuration and the tokenizer, and returns a task."""

from pathlib import Path
from typing import Any

import pytest

from klamp.errors import ConfigError, RewardError, UnknownNameError
from klamp.lab.tasks import Example, Task, TaskConfig, arithmetic_tokenizer, load_task, rows_task
from klamp.lab.tasks.base import has_own_prompts, short_name


def doubled(config: TaskConfig, tokenizer: Any) -> Task:
    """Rows made in place; the reward is broken for one completion."""
    task = rows_task([{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(30)], config, tokenizer)
    return Task(**{**vars(task), "score": lambda example, text: float("nan") if text == "nan" else len(text)})


def nothing(config: TaskConfig, tokenizer: Any) -> None:
    """No task."""


HERE = "tests.tasks.test_functions"


def load(name: str, **options: Any) -> Task:
    return load_task(TaskConfig(task=name, **options), arithmetic_tokenizer())


@pytest.mark.parametrize("module", [HERE, __file__])
def test_a_function_of_a_module_or_a_file_makes_the_task(module: str) -> None:
    task = load(f"{module}:doubled", train_size=5, eval_size=3)
    assert (task.name, len(task.train), len(task.evaluation["task"])) == ("doubled", 5, 3)
    assert task.score(task.train[0], "ab") == 2.0
    with pytest.raises(RewardError, match="not finite"):
        task.score(task.train[0], "nan")


def test_a_named_reward_takes_the_place_of_the_tasks_own() -> None:
    task = load(f"{HERE}:doubled", reward="exact_match")
    assert task.score(Example(prompt="1+1=", answer="2"), "2") == 1.0


def test_what_is_no_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="returned no task"):
        load(f"{HERE}:nothing")
    with pytest.raises(UnknownNameError, match="did you mean 'doubled'"):
        load(f"{HERE}:doubles")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load(f"{tmp_path / 'none.py'}:task")
    (tmp_path / "ends.py").write_text("raise BaseException('on import')")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load(f"{tmp_path / 'ends.py'}:task")


@pytest.mark.parametrize(
    ("task", "own", "name"),
    [
        ("arithmetic", True, "arithmetic"),
        ("my.tasks:chess", True, "chess"),
        ("dir/tasks.py:chess", True, "chess"),
        ("dir/data.jsonl", False, "data"),
        ("dir/a:b.jsonl", False, "a-b"),
        ("hub:openai/gsm8k:main:train", False, "gsm8k-main-train"),
    ],
)
def test_a_name_says_whether_a_task_brings_its_prompts(task: str, own: bool, name: str) -> None:
    assert (has_own_prompts(task), short_name(task)) == (own, name)
