"""The configuration of a task: what it refuses, and that every field says what it is."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest

from klamp.errors import ConfigError
from klamp.tasks import config
from klamp.tasks.config import TaskConfig


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": ""}, "no task is named"),
        ({"train_size": -1}, "train_size must be a whole number >= 0"),
        ({"eval_size": 0}, "eval_size must be a whole number >= 1"),
        ({"reward_timeout": 0.0}, "reward_timeout must be a number > 0"),
        ({"reward_timeout": 1e10}, "reward_timeout must be a number > 0 and at most 1e9"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        TaskConfig(**changes)
    assert str(next(iter(changes.values()))) in str(caught.value.got)
    assert caught.value.fix


def test_the_smallest_sizes_are_allowed() -> None:
    assert TaskConfig(train_size=0, eval_size=1).eval_size == 1


def test_a_configuration_is_read_only_and_takes_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TaskConfig().task = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        TaskConfig("arithmetic")  # pyright: ignore[reportCallIssue]


def test_every_field_has_a_plain_value_and_a_text_that_becomes_its_help() -> None:
    (tree,) = ast.parse(inspect.getsource(TaskConfig)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {
        before.target.id: after.value.value
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    for field in dataclasses.fields(TaskConfig):
        assert isinstance(field.default, str | int | bool | None), "a flag and a YAML key can hold it"
        assert texts[field.name].strip().endswith((".", '"".'))


def test_the_default_is_a_built_in_task() -> None:
    assert TaskConfig().task == config.ARITHMETIC_TASK
