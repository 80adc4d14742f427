"""The configuration of a task: flat fields, which become command-line flags and YAML keys."""

from __future__ import annotations

from dataclasses import dataclass

from klamp.core.arguments import AT_LEAST_0, AT_LEAST_1, SECONDS, check_fields
from klamp.errors import ConfigError

ARITHMETIC_TASK = "arithmetic"
"""The built-in task, which needs no data and has a base model of its own."""

DESCRIBE_TASK, DISTINCT_TASK, SENTIMENT_TASK = "describe", "describe-distinct", "sentiment"
LANGUAGE_TASKS = (DESCRIBE_TASK, DISTINCT_TASK, SENTIMENT_TASK)
"""Tasks in English that need no data, for any chat model."""


def has_own_prompts(task: str) -> bool:
    """Whether a task brings its prompts and its reward with it, rather than reading them from a file.

    Args:
        task: as `TaskConfig.task`.
    """
    return task in (ARITHMETIC_TASK, *LANGUAGE_TASKS) or task.startswith("reasoning_gym:")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The task of a run: which prompts are trained on, how completions are scored, what is held out.

    Raises:
        ConfigError: a size is below its minimum, or the task is not named.
    """

    task: str = "arithmetic"
    """`arithmetic`, `describe`, `describe-distinct` and `sentiment` (in English), `reasoning_gym:NAME`, or the path of
    a .jsonl, .json or .parquet file."""

    reward: str = ""
    """`exact_match`, `math_verify`, `format_regex:PATTERN` or `module:function`; empty: the task's own."""

    prompt_column: str = "prompt"
    """The column of a file that holds the prompt: a text, or a list of chat messages."""

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

    reward_timeout: float | None = None
    """Longest time in seconds that the reward of one completion may take; then the run ends. None: no limit."""

    def __post_init__(self) -> None:
        check_fields(self, {"train_size": AT_LEAST_0, "eval_size": AT_LEAST_1, "reward_timeout": SECONDS})
        if not self.task:
            raise ConfigError(
                "no task is named",
                got=repr(self.task),
                why="there is nothing to train on",
                fix='set task to "arithmetic", "reasoning_gym:NAME" or the path of a data file',
            )
