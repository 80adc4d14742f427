"""What a task is: its configuration, prompts, held-out prompts, and a reward for each completion.

The named rewards:

    exact_match            1 if the completion equals the answer, white space around both left out
    math_verify            1 if the math-verify package finds both to be the same mathematics
    module:function        your own; `path/to/file.py:function` works too

Your own function is called as `function(completion, **fields)`: the text of one completion without special tokens, and
those columns of its data row that its signature names (all, if it takes `**kwargs`). It returns one finite number. With
a parameter named `completions` it is called as TRL calls it, with lists of length one, and returns such a list.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import Parameter
from numbers import Real
from pathlib import Path
from typing import Any

from klamp.audit.function import load_function
from klamp.config.fields import setting
from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, check_fields
from klamp.errors import DataError, RewardError, brief, text_of, unknown_name

RewardFunction = Callable[["Example", str], Any]
"""An unchecked reward: an example and the text of one completion give a number."""
LARGEST_REWARD = 1e15  # the squares of rewards in this size can be added up over a group, in float32
ARITHMETIC_TASK = "arithmetic"  # the built-in task, which needs no data and has a base model of its own
HUB = "hub:"  # how the name of a data set of the hub begins: hub:NAME, hub:NAME:CONFIG, hub:NAME:CONFIG:SPLIT
NO_REWARD = "none"
"""The reward of a run that learns from its teacher alone; what the task scores is measured, and not trained on."""


def is_function(name: str) -> bool:
    """Whether a name has the form of a function's, `module:function`."""
    module, _, function = name.rpartition(":")
    return bool(module) and function.isidentifier()


def has_own_prompts(task: str) -> bool:
    """Whether a `TaskConfig.task` brings its prompts with it, rather than reading them from a file."""
    return task == ARITHMETIC_TASK or (is_function(task) and not task.startswith(HUB))


def short_name(task: str) -> str:
    """The word for a `TaskConfig.task` in logs and names of folders: its function, or the name of its file."""
    return task.rpartition(":")[2] if has_own_prompts(task) else Path(task).stem.replace(":", "-")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The task of a run: which prompts are trained on, how completions are scored, what is held out.

    Raises:
        ConfigError: a size is below its minimum.
    """

    task: str = "arithmetic"
    """`arithmetic`, the path of a .jsonl, .json or .parquet file, `hub:NAME:CONFIG:SPLIT` (a data set of the hub), or
    `module:function` (your own: it takes this configuration and the tokenizer, and returns a `Task`)."""
    reward: str = ""
    """`exact_match`, `math_verify`, `module:function`, or `none` (a teacher alone: beta is 0 unless it is set); empty:
    the task's own."""
    prompt_column: str = "prompt"
    """The column of the rows that holds the prompt: a text, or a list of chat messages."""
    answer_column: str = "answer"
    """The column of a file that holds the ground truth; a file without it has answers ""."""
    skill_column: str = ""
    """The column of a file that names each row's skill; empty: one skill, `task`."""
    reference_length_column: str = ""
    """The column of a file that holds the reference length in tokens for KL budgets; empty: none."""
    chat_template: bool | None = None
    """Whether prompts pass through the tokenizer's chat template; None: where it has one (not in arithmetic)."""
    system_prompt: str = ""
    """The system message put before each prompt; without a chat template, a text before it and an empty line."""
    train_size: int = setting(0, AT_LEAST_0)
    """How many training prompts to use at most; 0: all there are, and 4096 where prompts are generated."""
    eval_size: int = setting(256, AT_LEAST_1)
    """How many held-out examples to use at most for each skill."""
    eval_split: str = ""
    """The path of a file of held-out rows; empty: a deterministic share of the task's own rows."""
    task_seed: int = 0
    """The seed for generating and for splitting rows."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, and all that is needed to score its completion."""

    prompt: str  # the text to tokenize; a chat template, if any, is already applied
    answer: str = ""  # the ground truth; "" without one
    skill: str = "task"  # the row of the evaluation table that this example counts towards
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The whole data row; reward functions get it as keyword arguments."""
    reference_length: int | None = None
    """The length in tokens that KL budgets assume for this prompt; None where the data does not say."""

    @property
    def question(self) -> str:
        """The prompt as the data has it, without a chat template around it."""
        prompt = self.fields.get("prompt")
        return prompt if isinstance(prompt, str) else self.prompt


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts that RL trains on, the skills that are watched, and the reward."""

    name: str  # a short name for logs and folders
    train: Sequence[Example]  # the prompts of the RL skill
    evaluation: Mapping[str, Sequence[Example]]  # held-out examples per skill; the RL skill comes first
    rl_skill: str  # the skill that RL trains; the others show what training costs
    score: Callable[[Example, str], float]
    """The reward of one completion, given as text without special tokens; always a finite float."""
    read: frozenset[str] = frozenset()
    """Skills without an answer of the policy: their score is the probability that it gives each token of the example's
    own answer."""
    longest: int = 0  # tokens of the longest prompt, once they are checked

    @property
    def held_out(self) -> list[Example]:
        return [example for examples in self.evaluation.values() for example in examples]


def is_held_out(text: str, share: int) -> bool:
    """Whether a row is kept for evaluation, one in `share`: this depends on its text alone, on no seed and no size."""
    return zlib.crc32(text.encode()) % share == 0


def checked(function: RewardFunction, *, name: str) -> Callable[[Example, str], float]:
    """Wrap a reward function so that it returns a finite float of at most `LARGEST_REWARD`, or raises RewardError."""

    def score(example: Example, completion: str) -> float:
        where = f"  prompt: {brief(repr(example.prompt))}\n  completion: {brief(repr(completion))}"
        try:
            value = function(example, completion)
        except (RewardError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit, a cancelled task of asyncio
            what = f"the reward function {name} raised {type(error).__name__}"
            fix = "make the function return a number for every completion, 0 where it cannot be judged"
            why = "a completion without a reward cannot be trained on"
            raise RewardError(what, got=f"{text_of(error)}\n{where}", why=why, fix=fix) from error
        if sys.stdout is not None and sys.stdout.closed:
            what, fix = f"the reward function {name} closed stdout", "let it write to a file of its own"
            raise RewardError(what, got=where.strip(), why="nothing can be printed after that", fix=fix)
        number = _as_float(value)
        if number is not None and abs(number) <= LARGEST_REWARD:
            return number
        kind = f"{type(value).__name__}, not a number" if number is None else "a number that is too large or not finite"
        raise RewardError(
            f"the reward function {name} returned {kind}",
            got=f"{brief(repr(value) if number is None else str(number))}\n{where}",
            why="one such reward turns the advantages of its whole group into NaN, or stops training later on",
            fix=f"return a finite int, float or bool for every completion, at most {LARGEST_REWARD:g} in size",
        )

    return score


def _as_float(value: Any) -> float | None:
    """The value as a float, also of an array or a tensor of one element; None if it is no real number, as text is."""
    with suppress(ValueError, RuntimeError, TypeError):
        value = value.item() if hasattr(value, "item") else value
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


MATH_SECONDS = 5  # the longest that math-verify takes for each of its parts


def named_reward(name: str) -> Callable[[Example, str], float]:
    """The reward function of a name, with checked results; a ConfigError if the name cannot be used."""
    if name not in NEEDS_ANSWER and not is_function(name):
        raise unknown_name("reward", name, (*NEEDS_ANSWER, "module:function", NO_REWARD))
    return checked(NEEDS_ANSWER.get(name) or adapt(load_function(name)), name=name)


def with_reward(task: Task, name: str) -> Task:
    """A task with the reward of a name; a DataError if it compares with an answer, and an example has none."""
    for example in [*task.train, *task.held_out] if name in NEEDS_ANSWER else ():
        if not example.answer.strip():
            what, why = f"the reward {name} needs an answer, and an example has none", "every completion would score 0"
            fix = "name another reward, or the column of answers (answer_column), or remove rows without one"
            raise DataError(what, got=f"prompt {example.prompt[:200]!r}", why=why, fix=fix)
    return replace(task, score=named_reward(name))


def exact_match(example: Example, completion: str) -> float:
    """1.0 if the completion is the answer, except for white space around them, else 0.0."""
    return float(completion.strip() == example.answer.strip())


def math_verify(example: Example, completion: str) -> bool:
    from math_verify import parse, verify

    # math-verify keeps time with a signal, which Python allows in the main thread only; elsewhere there is no limit
    seconds = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    # an answer such as \frac{1}{2} is only recognised between dollar signs, a bare word only without them
    gold = parse(f"${example.answer.strip().strip('$')}$", parsing_timeout=seconds)  # pyright: ignore
    gold += parse(example.answer, parsing_timeout=seconds)  # pyright: ignore
    return verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds)  # pyright: ignore


NEEDS_ANSWER: Mapping[str, RewardFunction] = {"exact_match": exact_match, "math_verify": math_verify}
"""The named rewards that compare with the ground truth."""


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
