"""Tasks from the reasoning-gym package: any of its datasets, scored by its own rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from klamp.errors import DataError, missing_library, unknown_name
from klamp.tasks.base import Example, Task, TaskConfig, checked
from klamp.tasks.prompts import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRAIN_SIZE = 4096
"""How many prompts are generated where the configuration leaves it open."""


def reasoning_gym_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Load the task `reasoning_gym:NAME`.

    The first `eval_size` rows are held out, so that they stay the same whatever the size of training; a training row
    with the same question as a held-out one is left out. A completion is scored by the dataset's `score_answer`: by
    what stands in the last <answer>...</answer>, or by all of it where there is no such tag.

    Args:
        config: the name, the sizes, the seed and how prompts are written.
        tokenizer: its chat template is used where it has one, or as the configuration says.

    Raises:
        UnknownNameError: reasoning-gym has no dataset of this name.
        MissingLibrary: reasoning-gym is not installed.
        DataError: it has too few different questions.
    """
    name = config.task.partition(":")[2]
    dataset = _dataset(name, (config.train_size or _TRAIN_SIZE) + config.eval_size, config.task_seed)
    rows = [_example(dataset[i], name, config, tokenizer) for i in range(len(dataset))]
    held_out, rest = rows[: config.eval_size], rows[config.eval_size :]
    seen = {example.prompt for example in held_out}
    train = tuple(example for example in rest if example.prompt not in seen)
    if not train:
        raise DataError(
            f"reasoning_gym:{name} has too few different questions",
            got=f"{len(seen)} held-out questions, and none besides",
            why="evaluation needs questions that are not trained on",
            fix="set eval_size lower or train_size higher",
        )
    return Task(
        name=f"reasoning_gym-{name}",
        train=train,
        evaluation={name: tuple(held_out)},
        rl_skill=name,
        score=checked(_scorer(dataset), name=f"reasoning_gym:{name}"),
    )


def _dataset(name: str, size: int, seed: int) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise missing_library("reasoning-gym", by=f"the task reasoning_gym:{name}") from error
    if name not in DATASETS:
        raise unknown_name("reasoning-gym dataset", name, DATASETS)
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


def _example(entry: dict[str, Any], name: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Example:
    question, answer = entry["question"], entry["answer"]
    text = "" if answer is None else str(answer)  # some datasets have many right answers and name none
    return Example(
        prompt=prompt_text(question, config, tokenizer, where=f"a question of reasoning_gym:{name}"),
        answer=text,
        skill=name,
        fields={**entry, "prompt": question},
    )


def _scorer(dataset: Any) -> Any:
    from reasoning_gym.utils import extract_answer

    def score(example: Example, completion: str) -> float:
        answer = extract_answer(completion)
        return dataset.score_answer(completion.strip() if answer is None else answer, entry=dict(example.fields))

    return score
