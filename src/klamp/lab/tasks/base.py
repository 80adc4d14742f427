"""What a task is: its configuration, prompts, held-out prompts, a reward for each completion; functions of the user's.

A task is plain data plus one function. The trainer samples completions for `train`, scores them with `score`, and
evaluates every skill in `evaluation` the same way; it knows nothing about where the rows came from.
"""

from __future__ import annotations

import math
import runpy
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, check_fields
from klamp.errors import ConfigError, RewardError, brief, unknown_name
from klamp.files import at_home, with_end

RewardFunction = Callable[["Example", str], Any]
"""An unchecked reward: an example and the text of one completion give a number."""
LARGEST_REWARD = 1e15
"""The squares of rewards in this size can be added up over a group, in float32."""
ARITHMETIC_TASK = "arithmetic"
"""The built-in task, which needs no data and has a base model of its own."""
HUB = "hub:"
"""How the name of a data set of the hub begins: hub:NAME, hub:NAME:CONFIG, hub:NAME:CONFIG:SPLIT."""
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
    """`exact_match`, `math_verify`, `format_regex:PATTERN`, `module:function`, or `none` (with a teacher); empty: the
    task's own."""
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
    train_size: int = 0
    """How many training prompts to use at most; 0: all there are, and 4096 where prompts are generated."""
    eval_size: int = 256
    """How many held-out examples to use at most for each skill."""
    eval_split: str = ""
    """The path of a file of held-out rows; empty: a deterministic share of the task's own rows."""
    task_seed: int = 0
    """The seed for generating and for splitting rows."""

    def __post_init__(self) -> None:
        check_fields(self, {"train_size": AT_LEAST_0, "eval_size": AT_LEAST_1})


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt, and all that is needed to score a completion of it."""

    prompt: str
    """The text that is tokenized as it stands; a chat template, where one is used, is already applied."""
    answer: str = ""
    """The ground truth; "" where there is none."""
    skill: str = "task"
    """The row of the evaluation table that this example counts towards."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The whole data row; reward functions get it as keyword arguments."""
    reference_length: int | None = None
    """The length in tokens that KL budgets assume for this prompt; None where the data does not say."""

    @property
    def question(self) -> str:
        """The prompt as the data has it, without a chat template around it."""
        given = self.fields.get("prompt")
        return given if isinstance(given, str) else self.prompt


@dataclass(frozen=True, kw_only=True)
class Task:
    """The prompts that RL trains on, the skills that are watched, and the reward."""

    name: str
    """A short name for logs and folders."""
    train: Sequence[Example]
    """The prompts of the RL skill."""
    evaluation: Mapping[str, Sequence[Example]]
    """Held-out examples per skill; the RL skill comes first."""
    rl_skill: str
    """The skill that RL trains; the others show what training costs."""
    score: Callable[[Example, str], float]
    """The reward of one completion, given as text without special tokens; always a finite float."""
    read: frozenset[str] = frozenset()
    """Skills without an answer of the policy: their score is the probability that it gives each token of the example's
    own answer."""

    @property
    def held_out(self) -> list[Example]:
        """The held-out examples of all skills."""
        return [example for examples in self.evaluation.values() for example in examples]


def is_held_out(text: str, share: int) -> bool:
    """Whether a row is kept for evaluation, one in `share`: this depends on its text alone, on no seed and no size."""
    return zlib.crc32(text.encode()) % share == 0


def import_function(name: str, *, what: str) -> Callable[..., Any]:
    """Import a function by its name, `module:function` or `path/to/file.py:function`; `what` it is for is in errors."""
    module, _, function = name.rpartition(":")
    # a console script does not have the working directory on its path; at the end of the path it hides nothing
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        if module.endswith(".py"):
            loaded: Any = SimpleNamespace(**runpy.run_path(str(with_end(at_home(module)))))
        else:
            loaded = import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the module of a {what} cannot be imported",
            got=module,
            why=f"{type(error).__name__}: {error}",
            fix="run from the folder that holds the module, put it on PYTHONPATH, or write path/to/file.py:function",
        ) from error
    target = getattr(loaded, function, None)
    if not callable(target):
        raise unknown_name(what, function, [n for n, v in vars(loaded).items() if callable(v) and n[0] != "_"])
    return target


def checked(function: RewardFunction, *, name: str) -> Callable[[Example, str], float]:
    """Wrap a reward function so that it returns a finite float, or raises RewardError with its name.

    A bool counts as 0 or 1, and a number-like scalar (numpy, a tensor of one element) as its value. An exception of the
    function, or a number larger than `LARGEST_REWARD`, is a RewardError too.
    """

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
            raise RewardError(what, got=f"{error}\n{where}", why=why, fix=fix) from error
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
