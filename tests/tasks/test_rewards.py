"""Rewards by name, users' own functions in both calling conventions; finite floats."""

import io
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from klamp.errors import ConfigError, DataError, RewardError, UnknownNameError
from klamp.lab.tasks import Example, Task
from klamp.lab.tasks.base import adapt, checked, named_reward, with_reward

ROW = {"prompt": "2+2?", "answer": "4", "level": 3, "odd name": 1}
EXAMPLE = Example(prompt="<user>2+2?", answer="4", fields=ROW)


def score(function: Callable[..., Any], completion: str = "4", example: Example = EXAMPLE) -> float:
    return checked(adapt(function), name="mod:f")(example, completion)


@pytest.mark.parametrize(("completion", "expected"), [("4", 1), (" 4\n", 1), ("44", 0), ("", 0), ("four", 0)])
def test_exact_match_leaves_out_white_space_around(completion: str, expected: int) -> None:
    assert named_reward("exact_match")(EXAMPLE, completion) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("4", r"It is \boxed{4}.", 1),
        ("4", "so the answer is 5", 0),
        (r"\frac{1}{2}", "0.5", 1),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1),
        ("x^2+1", "$1+x^2$", 1),
        ("4", r"\frac{", 0),
    ],
)
def test_math_verify_compares_the_mathematics(answer: str, completion: str, expected: int) -> None:
    assert named_reward("math_verify")(Example(prompt="?", answer=answer), completion) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("format_regex", "unknown reward"),
        ("exact_mach", "(?s)unknown reward.*did you mean 'exact_match'"),
        ("no_such_module_at_all:f", "cannot be imported"),
        ("~/nowhere.py:f", "cannot be imported"),
    ],
)
def test_what_cannot_be_built_is_a_configuration_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        named_reward(name)


def test_a_function_gets_the_columns_it_names_or_the_whole_row_as_keywords() -> None:
    assert score(lambda completion, answer: completion == answer) == 1.0
    assert score(lambda text, level, other=2: level + other) == 5.0
    assert score(lambda prompt, completion: completion == "4" and prompt == "2+2?") == 1.0
    assert score(lambda completion, /, *, level: level) == 3.0
    assert score(len, "four") == 4.0
    assert score(lambda completion, **fields: completion == "4" and fields == ROW) == 1.0
    example = Example(prompt="p", fields={"completion": "of the data, which does not get in the way", "prompt": "p"})
    assert score(lambda completion, **fields: completion == "4" and fields == {"prompt": "p"}, example=example) == 1.0


def test_a_column_that_the_row_lacks_is_named() -> None:
    with pytest.raises(RewardError, match=r"(?s)mod:f raised TypeError.*'solution'.*2\+2"):
        score(lambda completion, solution: 1.0)


def test_trl_style_gets_lists_of_one() -> None:
    def reward(prompts: list[str], completions: list[str], level: list[int], **kwargs: Any) -> list[float]:
        assert prompts == ["2+2?"] and completions == ["4"]
        assert kwargs == {"answer": ["4"], "odd name": [1]}
        return [float(value) for value in level]

    assert score(reward) == 3.0
    assert score(lambda completions: [len(c) for c in completions], "12345") == 5.0


@pytest.mark.parametrize("returned", [[], [1.0, 2.0], 1.0, None, [None]])
def test_trl_style_that_does_not_return_one_number_is_a_reward_error(returned: Any) -> None:
    with pytest.raises(RewardError, match="mod:f"):
        score(lambda completions: returned)


REWARDS = "def one(completion, answer):\n    return completion == answer\nconstant = 3\n"


def test_module_and_function_from_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "klamp_rewards_on_path.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    reward = named_reward("klamp_rewards_on_path:one")
    assert (reward(EXAMPLE, "4"), reward(EXAMPLE, "5")) == (1.0, 0.0)
    with pytest.raises(UnknownNameError, match="(?s)unknown function.*did you mean 'one'"):
        named_reward("klamp_rewards_on_path:onne")
    with pytest.raises(ConfigError):
        named_reward("klamp_rewards_on_path:constant")


def test_a_module_that_fails_to_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ConfigError, match="a_module_that_is_not_there"):
        named_reward(f"{tmp_path}/broken.py:f")


def test_a_reward_that_compares_needs_an_answer_in_every_row() -> None:
    rows, held_out = [Example(prompt="no answer here")], {"task": [EXAMPLE]}
    task = Task(name="t", train=rows, evaluation=held_out, rl_skill="task", score=lambda example, completion: 0.5)
    with pytest.raises(DataError, match="(?s)math_verify needs an answer.*no answer here"):
        with_reward(task, "math_verify")
    with_reward(task, "tests.ablation.rewards:digits")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.5, -0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array([2.0]), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([1]), 1.0),
    ],
)
def test_numbers_pass_as_floats(value: Any, expected: float) -> None:
    score = checked(lambda example, completion: value, name="f")(EXAMPLE, "4")
    assert score == expected and type(score) is float


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1.0", [1.0], (), {}, math.nan, math.inf, -math.inf, 1j),
        *(1e308, -1e16, np.float64(2e15), np.nan, np.zeros(0), np.array(["1"]), torch.tensor(math.inf), torch.zeros(2)),
        *(pytest.param(10**digits, id=f"{digits} digits") for digits in (400, 5000)),
    ],
)
def test_anything_else_is_a_reward_error_that_names_function_and_prompt(value: Any) -> None:
    with pytest.raises(RewardError, match=r"(?s)my_reward returned.*<user>2\+2\?"):
        checked(lambda example, completion: value, name="my_reward")(EXAMPLE, "4")


def test_an_exception_becomes_a_reward_error_that_keeps_its_cause() -> None:
    def broken(example: Example, completion: str) -> float:
        return float(completion)

    with pytest.raises(RewardError, match=r"(?s)my_reward raised ValueError.*'two'.*<user>2\+2\?") as caught:
        checked(broken, name="my_reward")(EXAMPLE, "two")
    assert isinstance(caught.value.__cause__, ValueError)


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_without_a_text_and_a_closed_stdout_are_reward_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(example: Example, completion: str) -> float:
        raise Unprintable

    def closes(example: Example, completion: str) -> float:
        sys.stdout.close()
        return 0.0

    with pytest.raises(RewardError, match="my_reward raised Unprintable"):
        checked(broken, name="my_reward")(EXAMPLE, "two")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(RewardError, match="closed stdout"):
        checked(closes, name="my_reward")(EXAMPLE, "two")


def test_math_verify_works_off_the_main_thread() -> None:
    reward = named_reward("math_verify")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reward, EXAMPLE, r"\boxed{4}").result() == 1.0
        assert pool.submit(reward, EXAMPLE, r"\boxed{5}").result() == 0.0


def test_trl_style_gets_messages_where_the_prompt_is_messages() -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    example = Example(prompt="<user>2+2?", fields={"prompt": messages, "answer": "4"})

    def reward(completions: list[Any], prompts: list[Any]) -> list[float]:
        assert prompts == [messages]
        return [float(c[0]["content"] == "4" and c[0]["role"] == "assistant") for c in completions]

    assert score(reward, example=example) == 1.0


def test_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "klamp_rewards_in_cwd.py").write_text(REWARDS)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as under a console script
    monkeypatch.chdir(tmp_path)
    assert named_reward("klamp_rewards_in_cwd:one")(EXAMPLE, "4") == 1.0
