"""Reward functions: the named ones, and how a user's own function is called.

    exact_match            1 if the completion equals the answer, white space around both left out
    math_verify            1 if the math-verify package finds both to be the same mathematics
    format_regex:PATTERN   1 if `re.search` finds PATTERN in the completion ("." matches line ends too);
                           write \\A...\\Z to ask for the whole completion
    module:function        your own; `path/to/file.py:function` works too

Your own function is called as `function(completion, **fields)`: the text of one completion without special tokens,
and the columns of its data row as keyword arguments, `prompt` and `answer` among them. It gets only the columns that
its signature names, or all if it takes `**kwargs`, and returns one finite number.

A function with a parameter named `completions` is called as TRL calls it, with lists of length one:
`function(prompts=[...], completions=[...], **columns)`. It returns a list of one number. If the prompt is a list of
chat messages, the completion is one too, as in TRL.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

from klamp.errors import ConfigError, DataError, unknown_name
from klamp.lab.tasks.base import NO_REWARD, Example, RewardFunction, Task, checked, import_function, is_function

NEEDS_ANSWER = ("exact_match", "math_verify")
"""The named rewards that compare with the ground truth."""
MATH_SECONDS = 5
"""The longest that math-verify takes for each of its parts."""


def named_reward(name: str) -> Callable[[Example, str], float]:
    """Find the reward function of a name; its results are checked.

    Raises:
        UnknownNameError: no such reward.
        ConfigError: the pattern or the module cannot be used.
    """
    kind, _, rest = name.partition(":")
    if name == "exact_match":
        function: RewardFunction = exact_match
    elif name == "math_verify":
        function = math_verify
    elif kind == "format_regex":
        function = _format_regex(rest)
    elif is_function(name):
        function = adapt(import_function(name, what="reward function"))
    else:
        raise unknown_name("reward", name, (*NEEDS_ANSWER, "format_regex:PATTERN", "module:function", NO_REWARD))
    return checked(function, name=name)


def with_reward(task: Task, name: str) -> Task:
    """A task with the reward of a name; a DataError if it compares with an answer, and an example has none."""
    for example in [*task.train, *task.held_out] if name in NEEDS_ANSWER else ():
        if not example.answer.strip():
            what, why = f"the reward {name} needs an answer, and an example has none", "every completion would score 0"
            fix = "name another reward, or the column of answers (answer_column), or remove rows without one"
            raise DataError(what, got=f"prompt {example.prompt[:200]!r}", why=why, fix=fix)
    return replace(task, score=named_reward(name))


def exact_match(example: Example, completion: str) -> float:
    """The reward 1.0 if the completion is the answer, except for white space around them, else 0.0."""
    return float(completion.strip() == example.answer.strip())


def math_verify(example: Example, completion: str) -> bool:
    """Whether answer and completion are the same mathematics."""
    from math_verify import parse, verify

    # math-verify keeps time with a signal, which Python allows in the main thread only; elsewhere there is no limit
    seconds = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    # an answer such as \frac{1}{2} is only recognised between dollar signs, a bare word only without them
    gold = parse(f"${example.answer.strip().strip('$')}$", parsing_timeout=seconds)  # pyright: ignore
    gold += parse(example.answer, parsing_timeout=seconds)  # pyright: ignore
    return verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds)  # pyright: ignore


def _format_regex(pattern: str) -> RewardFunction:
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        fix = "write format_regex:PATTERN in the syntax of Python's re module"
        raise ConfigError("format_regex needs a regular expression", got=pattern, why=str(error), fix=fix) from error
    return lambda _, completion: expression.search(completion) is not None


def adapt(function: Callable[..., Any]) -> RewardFunction:
    """Turn a user's function into one of (example, completion); one in C that says no parameters gets the latter."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):
        parameters = {}
    named = {p.name for p in parameters.values() if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    everything = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    # `def f(prompt, completion)` is clear enough: a parameter of that name wins over the first place
    by_name = "completion" in named
    first = "completion" if by_name else next(iter(parameters), "")

    def taken(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in fields.items() if everything or key in named}

    def score(example: Example, completion: str) -> Any:
        columns = taken({key: value for key, value in example.fields.items() if key != first})
        return function(completion=completion, **columns) if by_name else function(completion, **columns)

    def score_lists(example: Example, completion: str) -> Any:
        prompt = example.fields.get("prompt", example.prompt)
        lists = {key: [value] for key, value in example.fields.items() if key not in ("prompt", "completions")}
        reply = completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
        (reward,) = function(completions=[reply], **taken(lists | {"prompts": [prompt]}))
        return reward

    return score_lists if "completions" in parameters else score
