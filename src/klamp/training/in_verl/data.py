"""A task as verl knows it: files of prompts ready to be tokenized, in the order of the run, and the reward.

The reward is verl's `reward.custom_reward_function`, called in the processes that score completions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from klamp.errors import DataError, RewardError
from klamp.tasks import load_task
from klamp.tasks.base import HUB, Example, Task, TaskConfig
from klamp.training.config import TrainConfig
from klamp.training.in_verl.overrides import TEACHER, Layout
from klamp.training.models import load_tokenizer
from klamp.training.sampling import examples_of_run

TRAIN = "train"
"""What stands in a row of the training prompts where a held-out one names its skill."""


def write_data(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> None:
    """Write what verl reads: the prompts, the tokenizer, and what the reward function opens the task with.

    Raises:
        DataError: a prompt is longer than max_prompt_length.
    """
    check_lengths(config, task, tokenizer)
    layout.train.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(layout.tokenizer))
    layout.task.write_text(json.dumps(opening(config.task, layout), indent=2), encoding="utf-8")
    _write(training_rows(config, task), layout.train)
    _write(held_out_rows(task), layout.held_out)


def training_rows(config: TrainConfig, task: Task) -> Iterator[dict[str, Any]]:
    """The prompts of all steps, in the order of klamp's own loop."""
    for i in examples_of_run(config, len(task.train)):
        key = config.teacher.teacher_key
        taught = {TEACHER: str(task.train[i].fields.get(key))} if key else {}
        yield row_of(task.train[i], skill=task.rl_skill, where=TRAIN, number=i) | taught


def held_out_rows(task: Task) -> Iterator[dict[str, Any]]:
    """The held-out prompts of every skill that is scored by what is answered."""
    for skill in answered(task):
        for i, example in enumerate(task.evaluation[skill]):
            yield row_of(example, skill=skill, where=skill, number=i)


def answered(task: Task) -> list[str]:
    """The skills whose score is the reward of an answer; those of `Task.read` verl has no place for."""
    return [skill for skill in task.evaluation if skill not in task.read]


def row_of(example: Example, *, skill: str, where: str, number: int) -> dict[str, Any]:
    """A prompt as a row of verl's: one message, whose text the template leaves as it stands.

    Args:
        example: the prompt.
        skill: that its score counts towards.
        where: the training prompts, or the skill whose held-out prompts it is one of.
        number: its place among them.
    """
    return {
        "data_source": skill,
        "prompt": [{"role": "user", "content": example.prompt}],
        "ability": skill,
        "reward_model": {"style": "rule", "ground_truth": example.answer},
        "extra_info": {"index": number, "where": where, "digest": digest(example)},
    }


def digest(example: Example) -> str:
    """A short word for a prompt and its answer, by which a row is known to be that of the task."""
    return hashlib.sha256(f"{example.prompt}\0{example.answer}".encode()).hexdigest()[:16]


def opening(task: TaskConfig, layout: Layout) -> dict[str, Any]:
    """What a process elsewhere opens the task with; files by absolute paths."""
    values = dataclasses.asdict(task)
    for name in ("task", "eval_split"):
        if values[name].startswith(HUB):  # a folder may hold a copy of it
            place, *more = values[name].removeprefix(HUB).split(":", 1)
            if Path(place).exists():
                values[name] = ":".join([f"{HUB}{Path(place).absolute()}", *more])
        elif values[name] and Path(values[name]).is_file():
            values[name] = str(Path(values[name]).absolute())
    return {"task": values, "tokenizer": str(layout.tokenizer), "folder": str(Path.cwd())}


def check_lengths(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse prompts that there is no room for.

    Raises:
        DataError: names the longest.
    """
    room = config.rollout.max_prompt_length
    held_out = (e for skill in answered(task) for e in task.evaluation[skill])
    texts = sorted({e.prompt for e in (*task.train, *held_out)})
    encoded: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    length, text = max((len(ids), text) for ids, text in zip(encoded, texts, strict=True))
    if length > room:
        raise DataError(
            "a prompt is longer than max_prompt_length",
            got=f"{length} tokens, room for {room}: {text[:100]!r}",
            why="verl would cut it, or stop at it in the middle of the run",
            fix=f"set max_prompt_length to {length} or more, or shorten the prompt",
        )


def _write(rows: Iterable[dict[str, Any]], file: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


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
        task: the file that `write_data` wrote.
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
