"""The task's reward as verl calls it: `reward.custom_reward_function`, in the processes that score completions."""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from klamp.errors import RewardError
from klamp.tasks import load_task
from klamp.tasks.base import Example, Task
from klamp.tasks.config import TaskConfig
from klamp.training.in_verl.data import TRAIN, digest
from klamp.training.models import load_tokenizer

_lock = threading.Lock()


def score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    task: str,
    **others: Any,
) -> float:
    """The reward of a completion; the arguments are verl's.

    Args:
        data_source: the skill.
        solution_str: the completion, without special tokens.
        ground_truth: the answer, which the task has too.
        extra_info: says which prompt of the task it is.
        task: the file that `klamp.training.in_verl.data` wrote.
        others: what else verl passes along.

    Raises:
        RewardError: the reward cannot be had, or the task here is not the one whose prompts were written.
    """
    with _lock:  # verl asks from several threads
        opened = open_task(task)
    return opened.score(example_of(opened, extra_info), solution_str)


@functools.cache
def open_task(file: str) -> Task:
    """The task of a run, loaded once per process."""
    told = json.loads(Path(file).read_text(encoding="utf-8"))
    if told["folder"] not in sys.path:
        sys.path.append(told["folder"])  # where a reward MODULE:FUNCTION is found
    return load_task(TaskConfig(**told["task"]), load_tokenizer(told["tokenizer"]))


def example_of(task: Task, row: Mapping[str, Any]) -> Example:
    """The prompt that a row of verl's was made of.

    Raises:
        RewardError: there is another one in its place.
    """
    examples = task.train if row["where"] == TRAIN else task.evaluation.get(row["where"], ())
    number = int(row["index"])
    found = examples[number] if number < len(examples) else None
    if found is None or digest(found) != row["digest"]:
        raise RewardError(
            "the task of the reward is not the one whose prompts were written",
            got=f"prompt {number} of {row['where']}: {'none' if found is None else repr(found.prompt[:100])}",
            why="the data have changed since, or this machine has other data, so that answers would be taken for wrong",
            fix="start the run again, with the data on storage that all machines share",
        )
    return found
