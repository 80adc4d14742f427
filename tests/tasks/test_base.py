"""Rewards are finite floats, or an error that says which function and which prompt."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from klamp.errors import RewardError
from klamp.tasks import Example, checked

EXAMPLE = Example(prompt="what is 1+1?", answer="2")


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
    score = checked(lambda example, completion: value, name="f")(EXAMPLE, "2")
    assert score == expected
    assert type(score) is float


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1.0", [1.0], (), {}, math.nan, math.inf, -math.inf, 1j),
        *(np.nan, np.zeros(0), np.array(["1"]), torch.tensor(math.inf), torch.zeros(2)),
    ],
)
def test_anything_else_is_a_reward_error_that_names_function_and_prompt(value: Any) -> None:
    with pytest.raises(RewardError, match=r"(?s)my_reward returned.*what is 1\+1\?"):
        checked(lambda example, completion: value, name="my_reward")(EXAMPLE, "2")


def test_an_exception_becomes_a_reward_error_that_keeps_its_cause() -> None:
    def broken(example: Example, completion: str) -> float:
        return float(completion)

    with pytest.raises(RewardError, match=r"(?s)my_reward raised ValueError.*'two'.*what is 1\+1\?") as caught:
        checked(broken, name="my_reward")(EXAMPLE, "two")
    assert isinstance(caught.value.__cause__, ValueError)


def test_stopping_the_program_is_no_reward_error() -> None:
    def stopped(example: Example, completion: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked(stopped, name="f")(EXAMPLE, "2")


def test_long_texts_are_cut_in_messages() -> None:
    with pytest.raises(RewardError) as caught:
        checked(lambda example, completion: None, name="f")(Example(prompt="p" * 10_000), "c" * 10_000)
    assert len(str(caught.value)) < 1500
