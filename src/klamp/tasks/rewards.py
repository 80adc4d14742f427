"""Reward functions: the named ones, how a user's own function is called, and what it may do to the process it is in.

    exact_match            1 where the completion equals the answer, white space around both left out
    math_verify            1 where the math-verify package finds the two to be the same mathematics
    format_regex:PATTERN   1 where `re.search` finds PATTERN in the completion ("." matches line ends too);
                           write \\A...\\Z to ask for the whole completion
    module:function        your own; `path/to/file.py:function` works too

Your own function is called as `function(completion, **fields)`: the text of one completion without special tokens,
and the columns of its data row as keyword arguments, `prompt` and `answer` among them. It gets only the columns that
its signature names, or all where it takes `**kwargs`, and returns one finite number.

A function with a parameter named `completions` is called the way TRL calls it, with lists of length one:
`function(prompts=[...], completions=[...], **columns)`. It returns a list of one number. Where the prompt is a list of
chat messages, the completion is one too, as in TRL.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, chdir, suppress
from dataclasses import replace
from typing import Any

import torch

from klamp.errors import ConfigError, DataError, RewardError, missing_library, unknown_name
from klamp.tasks.base import NO_REWARD, Example, RewardFunction, Task, checked, where
from klamp.tasks.functions import import_function, is_function

Score = Callable[[Example, str], float]

NEEDS_ANSWER = ("exact_match", "math_verify")
"""The named rewards that compare with the ground truth."""

_MATH_SECONDS = 5


def named_reward(name: str) -> Callable[[Example, str], float]:
    """Find the reward function of a name; its results are checked.

    Args:
        name: `exact_match`, `math_verify`, `format_regex:PATTERN`, `module:function`.

    Raises:
        UnknownNameError: no such reward.
        ConfigError: the pattern, the module or the function cannot be used.
    """
    kind, _, rest = name.partition(":")
    if name == "exact_match":
        return checked(exact_match, name=name)
    if name == "math_verify":
        return checked(_math_verify(), name=name)
    if kind == "format_regex":
        return checked(_format_regex(rest), name=name)
    if is_function(name):
        return checked(adapt(import_function(name, what="reward function"), name=name), name=name)
    raise unknown_name(
        "reward", name, ("exact_match", "math_verify", "format_regex:PATTERN", "module:function", NO_REWARD)
    )


def with_reward(task: Task, name: str) -> Task:
    """A task with another reward, given by name.

    Args:
        task: its prompts and answers are kept.
        name: as in `named_reward`.

    Raises:
        DataError: the reward compares with an answer, and an example has none.
    """
    if name in NEEDS_ANSWER:
        rows = [*task.train, *(example for held_out in task.evaluation.values() for example in held_out)]
        for example in rows:
            if not example.answer.strip():
                raise DataError(
                    f"the reward {name} needs an answer, and an example has none",
                    got=f"prompt {example.prompt[:200]!r}",
                    why="every completion of it would score 0, and nothing could be learned from it",
                    fix="name another reward, or the column of answers (answer_column), or remove rows without one",
                )
    return replace(task, score=named_reward(name))


def exact_match(example: Example, completion: str) -> float:
    """The reward 1.0 where the completion is the answer, except for white space around them, else 0.0."""
    return float(completion.strip() == example.answer.strip())


def _format_regex(pattern: str) -> RewardFunction:
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            "the pattern of format_regex is not a regular expression",
            got=repr(pattern),
            why=str(error),
            fix="write it in the syntax of Python's re module",
        ) from error
    if not pattern:
        raise ConfigError(
            "format_regex has no pattern", why="an empty one is found anywhere", fix="format_regex:PATTERN"
        )
    return lambda _, completion: expression.search(completion) is not None


def _math_verify() -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise missing_library("math-verify", by="the reward math_verify") from error

    def score(example: Example, completion: str) -> bool:
        # math-verify keeps time with a signal, which Python allows in the main thread only; elsewhere there is no limit
        seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
        # an answer such as \frac{1}{2} is only recognised between dollar signs, a bare word only without them
        gold = parse(f"${example.answer.strip().strip('$')}$", parsing_timeout=seconds)  # pyright: ignore
        gold += parse(example.answer, parsing_timeout=seconds)  # pyright: ignore
        return verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds)  # pyright: ignore

    return score


def adapt(function: Callable[..., Any], *, name: str) -> RewardFunction:
    """Turn a user's function into one of (example, completion); the top of this file says how it may be written.

    Args:
        function: takes one completion, or TRL's lists.
        name: how error messages name it.

    Raises:
        ConfigError: the function takes nothing, or does not say what it takes, as one in C.
    """
    try:
        taken = inspect.signature(function).parameters
    except (ValueError, TypeError):
        taken = {}
    if not taken:
        raise ConfigError(
            f"the reward function {name} takes no argument that is known",
            got=name,
            why="it has to be given the completion",
            fix="define it as function(completion, **fields)",
        )
    return _trl_style(function, name) if "completions" in taken else _one_completion(function, name)


def _one_completion(function: Callable[..., Any], name: str) -> RewardFunction:
    parameters = inspect.signature(function).parameters
    # `def f(prompt, completion)` is clear enough: a parameter of that name wins over the first place
    by_name = "completion" in parameters and parameters["completion"].kind is not inspect.Parameter.POSITIONAL_ONLY
    taken = "completion" if by_name else next(iter(parameters))

    def score(example: Example, completion: str) -> Any:
        given = _accepted(function, {k: v for k, v in example.fields.items() if k != taken}, taken, name, example)
        return function(**{taken: completion}, **given) if by_name else function(completion, **given)

    return score


def _trl_style(function: Callable[..., Any], name: str) -> RewardFunction:
    def score(example: Example, completion: str) -> Any:
        row = {k: v for k, v in example.fields.items() if k not in ("prompt", "prompts", "completions")}
        prompt = example.fields.get("prompt", example.prompt)
        chat = not isinstance(prompt, str)
        lists = {key: [value] for key, value in row.items()} | {"prompts": [prompt]}
        given = _accepted(function, lists, "completions", name, example)
        reply = [{"role": "assistant", "content": completion}] if chat else completion
        rewards = function(completions=[reply], **given)
        if len(rewards) != 1:
            raise ValueError(f"it was given one completion and returned {len(rewards)} rewards")
        return rewards[0]

    return score


def _accepted(
    function: Callable[..., Any], fields: Mapping[str, Any], taken: str, name: str, example: Example
) -> dict[str, Any]:
    """The fields of a data row that the function takes; RewardError where the row lacks one that it needs."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepted = dict(fields)
    else:
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        accepted = {key: value for key, value in fields.items() if key in names}
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty]
    missing = [p.name for p in named if p.name not in accepted and p.name != taken]
    if missing:
        raise RewardError(
            f"the reward function {name} needs {', '.join(missing)}, which the data row does not have",
            got=f"prompt {example.prompt[:200]!r} with the columns {', '.join(sorted(fields)) or 'none'}",
            why="each parameter without a default is filled from the column of its name",
            fix="rename the parameter or the column, or give the parameter a default",
        )
    return accepted


def guarded(score: Score, *, seconds: float | None) -> Score:
    """A reward that hands the process back as it was, and in time.

    Args:
        score: the reward.
        seconds: the longest that it may take for one completion; None: as long as it likes.

    Returns:
        A function of the same signature. The working directory and the switch of gradients are put back after it. It
        raises RewardError where the reward took too long. A process that the reward has forked ends where it would come
        back from the reward, with code 1 and one line: two would train in one folder.
    """

    def call(example: Example, completion: str) -> float:
        process = os.getpid()
        try:
            return score(example, completion)
        finally:
            if os.getpid() != process:
                os.write(2, b"klamp: the reward function came back in a process that it had forked, which ends here\n")
                os._exit(1)

    timed = call if seconds is None else _in_time(call, seconds)

    def guard(example: Example, completion: str) -> float:
        with ExitStack() as back, torch.set_grad_enabled(torch.is_grad_enabled()):
            with suppress(OSError):  # the folder was deleted meanwhile
                back.enter_context(chdir("."))
            return timed(example, completion)

    return guard


def _in_time(score: Score, seconds: float) -> Score:
    """The reward in a thread that is left to itself once its time is up: code that hangs cannot be stopped."""

    def call(example: Example, completion: str) -> float:
        found: list[float] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                found.append(score(example, completion))
            except BaseException as error:  # raised again below, in the thread that asked
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not found:
            raise RewardError(
                "the reward function took too long",
                got=f"no answer within {seconds:g} seconds\n{where(example, completion)}",
                why="reward_timeout ends a run whose reward hangs",
                fix="mend the function, or raise reward_timeout",
            )
        return found[0]

    return call
