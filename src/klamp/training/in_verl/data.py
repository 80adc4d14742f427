"""A task as verl's files: prompts ready to be tokenized, in the order of the run; held-out prompts of every skill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from klamp.errors import DataError
from klamp.tasks.base import Example, Task
from klamp.tasks.config import TaskConfig
from klamp.training.config import TrainConfig
from klamp.training.in_verl.layout import Layout
from klamp.training.sampling import examples_of_step

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
    size, run = config.rollout.prompts_per_step, config.run
    for step in range(run.max_steps):
        for i in examples_of_step(step, len(task.train), size=size, seed=run.seed):
            yield row_of(task.train[i], skill=task.rl_skill, where=TRAIN, number=i)


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
        if values[name] and Path(values[name]).is_file():
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
