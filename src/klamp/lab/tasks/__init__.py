"""Tasks: prompts, held-out prompts and rewards, from the built-in task, data files, or a function of yours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from klamp.audit.function import load_function
from klamp.errors import ConfigError
from klamp.lab.tasks.arithmetic import arithmetic_task, arithmetic_tokenizer, load_base_model
from klamp.lab.tasks.base import (
    ARITHMETIC_TASK,
    NO_REWARD,
    Example,
    Task,
    TaskConfig,
    checked,
    has_own_prompts,
    with_reward,
)
from klamp.lab.tasks.files import read_rows, rows_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Example",
    "Task",
    "TaskConfig",
    "arithmetic_task",
    "arithmetic_tokenizer",
    "load_base_model",
    "load_task",
    "rows_task",
]


def load_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Load the task that a configuration names; a ConfigError or DataError if it cannot be used."""
    if config.task == ARITHMETIC_TASK:
        for name in ("eval_split", "skill_column", "reference_length_column", "chat_template", "system_prompt"):
            if value := getattr(config, name):
                what, why = f"{name} has no meaning for the task {config.task}", "its prompts are bare sums and words"
                raise ConfigError(what, got=f"{name}={value!r}", why=why, fix=f"leave {name} unset")
        task = arithmetic_task(config)
    elif has_own_prompts(config.task):
        task = load_function(config.task)(config, tokenizer)
        if not isinstance(task, Task):
            fix = "return a klamp.lab.tasks.Task; klamp.lab.tasks.rows_task makes one of rows"
            what, why = f"{config.task} returned no task", "what it returns is trained on"
            raise ConfigError(what, got=type(task).__name__, why=why, fix=fix)
        task = replace(task, score=checked(task.score, name=config.task))
    else:
        held_out = read_rows(config.eval_split) if config.eval_split else None
        task = rows_task(read_rows(config.task), config, tokenizer, held_out=held_out)
    return with_reward(task, config.reward) if config.reward not in ("", NO_REWARD) else task
