"""klamp's protocol for a reference on another machine: what a question and an answer have to be, on both sides.

One POST with JSON, one answer with JSON::

    {"prompts": [[ids]], "completions": [[ids]], "temperature": 1.0}   ->   {"logprobs": [[nats]]}

A question that is none is answered with a status from 400 on and `{"error": "why"}`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch

from klamp.errors import DataError

FIELDS = ("prompts", "completions", "temperature")
LARGEST_QUESTION = 64 * 2**20
"""Bytes of a question."""
MOST_TOKENS = 2**22
"""Tokens of a question, each row as long as the longest."""
TEMPERATURES = (1e-3, 1e3)
"""The lowest and the highest temperature: beyond them logits / temperature leaves float32, or says nothing."""
ABOVE_ZERO = 1e-3
"""What rounding may add to a log-probability of 0."""
LOWEST = torch.finfo(torch.float32).min
"""The lowest log-probability."""
SHOWN = 60
"""Characters of what was sent that a refusal repeats."""


class Question(NamedTuple):
    """What a reference is asked."""

    prompts: list[list[int]]
    """The ids before each completion."""
    completions: list[list[int]]
    """The ids that are scored."""
    temperature: float
    """That of the sampler."""


def question_of(asked: object, *, vocabulary: int, longest: int | None) -> Question:
    """What is asked, once all of it is found to be possible.

    Args:
        asked: what was sent.
        vocabulary: the model's ids are below it.
        longest: tokens that the model takes; None: any number.

    Raises:
        DataError: it is no question, or one that this model has no answer to.
    """
    if not isinstance(asked, dict):
        raise _refused("a question is an object", asked, fix="send {'prompts': ..., 'completions': ...}")
    content: dict[str, Any] = asked  # pyright: ignore[reportUnknownVariableType]
    for name in content.keys() - set(FIELDS):
        raise _refused("a question has no such field", name, fix=f"send {', '.join(FIELDS)}")
    prompts, completions = (_rows(name, content.get(name), vocabulary) for name in FIELDS[:2])
    if len(prompts) != len(completions):
        raise _refused(
            "there are as many prompts as completions",
            f"{len(prompts)} prompts, {len(completions)} completions",
            fix="send the prompt of each completion",
        )
    if not all(prompts):
        raise _refused("a prompt has a token", [], fix="send at least the token before the completion's first")
    _check_lengths(prompts, completions, longest)
    return Question(prompts, completions, _temperature(content.get("temperature", 1.0)))


def _rows(name: str, rows: object, vocabulary: int) -> list[list[int]]:
    if not isinstance(rows, list):
        raise _refused(f"{name} is a list of lists of token ids", rows, fix=f"send {name}: [[id, ...], ...]")
    for row in rows:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(row, list):
            raise _refused(f"each of the {name} is a list of token ids", row, fix=f"send {name}: [[id, ...], ...]")
        for token in row:  # pyright: ignore[reportUnknownVariableType]
            if type(token) is not int or not 0 <= token < vocabulary:
                raise _refused(
                    f"an id in {name} is none of the model's",
                    token,
                    fix=f"send whole numbers from 0 to {vocabulary - 1}, of the tokenizer that the model was made with",
                )
    return rows  # pyright: ignore[reportUnknownVariableType]


def _check_lengths(prompts: list[list[int]], completions: list[list[int]], longest: int | None) -> None:
    most = max((len(a) + len(b) for a, b in zip(prompts, completions, strict=True)), default=0)
    if longest is not None and most > longest:
        raise _refused("a sequence is longer than the model takes", most, fix=f"send at most {longest} tokens in each")
    padded = len(prompts) * (max(map(len, prompts), default=0) + max(map(len, completions), default=0))
    if padded > MOST_TOKENS:
        raise _refused(
            "the question has too many tokens",
            padded,
            fix=f"send at most {MOST_TOKENS}, each row as long as the longest",
        )


def _temperature(x: object) -> float:
    low, high = TEMPERATURES
    if isinstance(x, bool) or not isinstance(x, int | float) or not low <= x <= high:
        raise _refused("temperature is no number that can be sampled at", x, fix=f"send one from {low:g} to {high:g}")
    return float(x)


def _refused(what: str, got: object, *, fix: str) -> DataError:
    text = got if isinstance(got, str) else f"{type(got).__name__} {_short(got)}"
    return DataError(what, got=text[:SHOWN], fix=fix)


def _short(x: object) -> str:
    """The beginning of a value; numbers of thousands of digits, which Python does not write, by their size."""
    if isinstance(x, int) and abs(x) > 2**64:
        return f"of {x.bit_length()} bits"
    return str(x) if isinstance(x, int | float) else f"of {len(x)}" if isinstance(x, list | dict) else ""


def fault_of(answer: object, completions: list[list[int]]) -> str:
    """Why an answer is none to a question for these completions; "" where it is one."""
    if not isinstance(answer, list):
        return "it returned no list of log-probabilities"
    rows: list[object] = answer
    if not all(isinstance(row, list) for row in rows):
        return "it returned no list of log-probabilities for each completion"
    if [len(row) for row in rows if isinstance(row, list)] != [len(row) for row in completions]:
        return "it returned log-probabilities of other lengths than the completions"
    if not all(is_logprob(x) for row in rows if isinstance(row, list) for x in row):
        return "it returned something else than log-probabilities: finite numbers that are not above 0"
    return ""


def is_logprob(x: object) -> TypeGuard[float]:
    """Whether this is a number that a log-probability can be, in float32."""
    return isinstance(x, int | float) and not isinstance(x, bool) and LOWEST <= x <= ABOVE_ZERO
