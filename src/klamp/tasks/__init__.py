"""Tasks: prompts, held-out prompts and rewards, from the built-in task, reasoning-gym, or data files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from klamp.errors import ConfigError
from klamp.tasks.arithmetic import arithmetic_task, arithmetic_tokenizer
from klamp.tasks.base import (
    ARITHMETIC_TASK,
    LANGUAGE_TASKS,
    NO_REWARD,
    Example,
    Task,
    TaskConfig,
    checked,
    has_own_prompts,
)
from klamp.tasks.base_model import BaseModelConfig, base_model_folder, load_base_model
from klamp.tasks.language import language_task
from klamp.tasks.named_models import NAMED_MODELS, load_named_model, named_model_folder
from klamp.tasks.prompts import check_prompts
from klamp.tasks.rewards import guarded, named_reward, with_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "NAMED_MODELS",
    "BaseModelConfig",
    "Example",
    "Task",
    "TaskConfig",
    "arithmetic_task",
    "arithmetic_tokenizer",
    "base_model_folder",
    "check_prompts",
    "checked",
    "load_base_model",
    "load_named_model",
    "load_task",
    "named_model_folder",
    "named_reward",
]


def load_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Load the task that a configuration names; its prompts are ready to be tokenized.

    Args:
        config: where the rows come from and how completions are scored.
        tokenizer: its chat template is applied where the configuration, or the kind of data, asks for it.

    Raises:
        UnknownNameError: no task or reward of this name.
        DataError: rows that cannot be used.
        ConfigError: options that do not fit this kind of task.
    """
    _refuse_unused(config)
    if config.task == ARITHMETIC_TASK:
        task = arithmetic_task(config)
    elif config.task in LANGUAGE_TASKS:
        task = language_task(config, tokenizer)
    elif config.task.startswith("reasoning_gym:"):
        from klamp.tasks.reasoning_gym import reasoning_gym_task

        task = reasoning_gym_task(config, tokenizer)
    else:
        from klamp.tasks.files import file_task

        task = file_task(config, tokenizer)
    task = with_reward(task, config.reward) if config.reward not in ("", NO_REWARD) else task
    return replace(task, score=guarded(task.score, seconds=config.reward_timeout))


_FILES_ONLY = ("eval_split", "skill_column", "reference_length_column")
_NOT_ARITHMETIC = ("chat_template", "system_prompt")


def _refuse_unused(config: TaskConfig) -> None:
    """Refuse options that this kind of task would ignore."""
    unused = _FILES_ONLY if has_own_prompts(config.task) else ()
    unused += _NOT_ARITHMETIC if config.task == ARITHMETIC_TASK else ()
    for name in unused:
        if getattr(config, name):
            raise ConfigError(
                f"{name} has no meaning for the task {config.task}",
                got=f"{name}={getattr(config, name)!r}",
                why="its prompts are klamp's own, not read from a file"
                if name in _FILES_ONLY
                else "its prompts are bare sums and words, as the base model learned them",
                fix=f"leave {name} unset",
            )
