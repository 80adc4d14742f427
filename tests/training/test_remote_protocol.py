"""What a question and an answer of the remote reference have to be."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from klamp.errors import DataError
from klamp.training.remote_protocol import LOWEST, MOST_TOKENS, Question, fault_of, question_of

GOOD = {"prompts": [[1, 2], [3]], "completions": [[4], []], "temperature": 0.7}


def asked(**changes: Any) -> Question:
    return question_of({**GOOD, **changes}, vocabulary=10, longest=4)


def test_a_question_is_taken_as_it_is() -> None:
    assert asked() == ([[1, 2], [3]], [[4], []], 0.7)
    assert question_of({"prompts": [], "completions": []}, vocabulary=10, longest=None) == ([], [], 1.0)
    assert asked(temperature=1) == ([[1, 2], [3]], [[4], []], 1.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompts": None}, "prompts is a list"),
        ({"prompts": {"a": [1]}}, "prompts is a list"),
        ({"completions": "abc"}, "completions is a list"),
        ({"prompts": [[1], 2]}, "each of the prompts is a list"),
        ({"prompts": [[1]]}, "as many prompts as completions"),
        ({"prompts": [[1], []]}, "a prompt has a token"),
        ({"prompts": [[1], [[2]]]}, "an id in prompts"),
        *(({"completions": [[4], [x]]}, "an id in completions") for x in (-1, 10, True, 1.0, "1", None, 10**5000)),
        ({"completions": [[4, 4, 4], []]}, "longer than the model takes"),
        *(
            ({"temperature": x}, "temperature")
            for x in (0, -1, 1e-9, 1e9, math.nan, math.inf, True, None, "1", [], 10**5000)
        ),
        ({"more": 1}, "no such field"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        asked(**changes)
    assert caught.value.got and caught.value.fix and len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [None, 1, [], "prompts"])
def test_a_question_is_an_object(content: object) -> None:
    with pytest.raises(DataError, match="is an object"):
        question_of(content, vocabulary=10, longest=4)


def test_rows_that_would_be_padded_without_measure_are_refused() -> None:
    rows = [[1]] * 3000
    with pytest.raises(DataError, match="too many tokens"):
        question_of(
            {"prompts": rows, "completions": [[1] * (MOST_TOKENS // 3000), *rows[1:]]}, vocabulary=10, longest=None
        )


@pytest.mark.parametrize(
    "row",
    [
        *([x] for x in (None, "x", True, [], {}, math.nan, math.inf, -math.inf, 0.01, 1, 10**400, -(10**400))),
        *([], [-1.0, -1.0], None, -1.0),
    ],
)
def test_an_answer_of_another_kind_has_a_fault(row: object) -> None:
    assert fault_of([row], [[3]])
    assert fault_of([row, [-1.0]], [[3], [3]])


def test_an_answer_has_none() -> None:
    assert fault_of(json.loads(f"[[-1, 0, -1e-3, 1e-4, {LOWEST}], []]"), [[1] * 5, []]) == ""
    assert fault_of([], []) == ""
    assert all(fault_of(each, []) for each in (None, {}, "", 0, [[]]))
