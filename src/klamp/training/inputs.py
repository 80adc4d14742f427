"""What a run reads before its model: the tokenizer, the prompts and the reward, opened without making anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from klamp.tasks import check_prompts, load_task, named_model_folder, named_reward
from klamp.tasks.arithmetic import MAX_MODEL_LENGTH, arithmetic_tokenizer
from klamp.tasks.config import has_own_prompts
from klamp.tasks.named_models import NAMED_MODELS
from klamp.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What was found when the inputs of a run were opened."""

    training: int
    """Prompts to train on."""
    held_out: int
    """Prompts that are held out, of all skills."""
    longest: int
    """Tokens of the longest prompt."""


def open_inputs(config: TrainConfig) -> Inputs | str:
    """Open the tokenizer, the prompts and the reward of a run as the run itself will, without its weights.

    A tokenizer of a hub is downloaded as the run would; a model that klamp has to make first is not made: then the data
    file and the reward are opened alone, and the answer says why.

    Args:
        config: what would run.

    Raises:
        ModelError, DataError, RewardError, ConfigError: what would stop the run before its first step.
    """
    given, task = config.model, config.task
    named = given.tokenizer or given.model
    if unready := _unready(config, named):
        if not has_own_prompts(task.task):
            from klamp.tasks.files import check_columns, read_rows

            for file in filter(None, (task.task, task.eval_split)):
                check_columns(read_rows(file), file, task)
        if task.reward:
            named_reward(task.reward)
        return unready
    tokenizer, longest = _tokenizer(config, named)
    found = load_task(task, tokenizer)
    held_out = [example for rows in found.evaluation.values() for example in rows]
    tokens = check_prompts([*found.train, *held_out], tokenizer, longest, config.rollout.max_completion_length)
    return Inputs(training=len(found.train), held_out=len(held_out), longest=tokens)


def _unready(config: TrainConfig, named: str) -> str:
    """Why there is no tokenizer to be opened yet; empty: there is one."""
    if config.run.backend == "tinker" and not config.model.tokenizer:
        return "the tokenizer is asked of the Tinker service"
    missing = [n for n in (named, config.model.model) if n in NAMED_MODELS and not named_model_folder(n).is_dir()]
    return f"{missing[0]} is converted first" if missing else ""


def _tokenizer(config: TrainConfig, named: str) -> tuple[PreTrainedTokenizerBase, int | None]:
    """The tokenizer, and how many tokens the model can hold; None: it does not say."""
    from klamp.training.models import BUILTIN, describe_folder, load_tokenizer, ready_tokenizer

    builtin = config.model.model == BUILTIN
    # the built-in model may have to be taught first; its tokenizer need not
    tokenizer = ready_tokenizer(arithmetic_tokenizer(), named) if named == BUILTIN else load_tokenizer(named)
    if builtin or config.run.backend == "tinker":
        return tokenizer, MAX_MODEL_LENGTH if builtin else None
    return tokenizer, describe_folder(config.model.model)[0]
