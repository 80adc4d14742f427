"""A task as verl reads it: files of prompts ready to be tokenized, in the order of the run, and the reward.

The reward is verl's `reward.custom_reward_function`, called in the processes that score completions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from klamp.lab.anchors import check_keys, check_tokens_of
from klamp.lab.config import TrainConfig
from klamp.lab.engines.verl.overrides import TEACHER, Layout
from klamp.lab.models import check_weights, length_of, load_tokenizer, make_ready, model_path
from klamp.lab.sampling import examples_of_run
from klamp.lab.setup import load_prompts
from klamp.lab.tasks import load_task
from klamp.lab.tasks.base import Example, Task, TaskConfig
from klamp.lab.tasks.files import check_prompts


def write_inputs(config: TrainConfig, layout: Layout) -> None:
    """Check that model, task and teachers fit together, and write what verl reads."""
    models = config.teacher.models if config.teacher.there else {}
    for name in (config.model.model, *models.values()):
        make_ready(name)
        check_weights(model_path(name))
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model)
    # verl would cut a longer prompt, or stop at it in the middle of the run
    room = config.rollout.max_prompt_length + config.rollout.max_completion_length
    longest = length_of(model_path(config.model.model))
    task = load_prompts(config, tokenizer, longest=min(longest or room, room))
    if models:
        check_keys(config, task, models)
    for name in models.values():
        longest = length_of(model_path(name))
        check_prompts(task.train, tokenizer, longest, config.rollout.max_completion_length + 1)  # verl's takes one more
        check_tokens_of(name, tokenizer)
    write_data(config, task, tokenizer, layout)


def write_data(config: TrainConfig, task: Task, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> None:
    """Write the prompts, the tokenizer, and what the reward function opens the task with."""
    layout.train.parent.mkdir(parents=True, exist_ok=True)
    if layout.metrics.exists():  # verl writes its log anew
        number = 1 + len(list(layout.train.parent.glob("log-before-resume-*")))
        layout.metrics.rename(layout.train.parent / f"log-before-resume-{number}.jsonl")
    tokenizer.save_pretrained(str(layout.tokenizer))
    opening = {"task": dataclasses.asdict(config.task), "tokenizer": str(layout.tokenizer), "folder": str(Path.cwd())}
    layout.task.write_text(json.dumps(opening, indent=2), encoding="utf-8")
    _write(training_rows(config, task), layout.train)
    _write(held_out_rows(task), layout.held_out)


def training_rows(config: TrainConfig, task: Task) -> Iterator[dict[str, Any]]:
    """The prompts of all steps, in the order of klamp's own loop."""
    key = config.teacher.teacher_key
    for i in examples_of_run(config, len(task.train)):
        taught = {TEACHER: str(task.train[i].fields.get(key))} if key else {}
        yield row_of(task.train[i], skill=task.rl_skill) | taught


def held_out_rows(task: Task) -> Iterator[dict[str, Any]]:
    """The held-out prompts of every skill that is scored by an answer; verl has no place for those of `Task.read`."""
    for skill, examples in task.evaluation.items():
        yield from (row_of(example, skill=skill) for example in examples if skill not in task.read)


def row_of(example: Example, *, skill: str) -> dict[str, Any]:
    """A prompt as a row of verl's: one message, whose text the template leaves as it is, and all a reward needs."""
    return {
        "data_source": skill,
        "prompt": [{"role": "user", "content": example.prompt}],
        "ability": skill,
        "reward_model": {"style": "rule", "ground_truth": example.answer},
        "extra_info": {"example": json.dumps(dataclasses.asdict(example), default=str)},
    }


def _write(rows: Iterable[dict[str, Any]], file: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


_lock = threading.Lock()


def score(data_source: str, solution_str: str, *, extra_info: Mapping[str, Any], task: str, **others: Any) -> float:
    """The reward of a completion, for a prompt that `row_of` wrote and the task file of `write_data`; verl calls it."""
    with _lock:  # verl asks from several threads
        return open_task(task).score(Example(**json.loads(extra_info["example"])), solution_str)


@functools.cache
def open_task(file: str) -> Task:
    """The task of a run, loaded once per process, in the folder that the run was started from."""
    opening = json.loads(Path(file).read_text(encoding="utf-8"))
    if opening["folder"] not in sys.path:
        sys.path.append(opening["folder"])  # for a reward MODULE:FUNCTION
    with chdir(opening["folder"]):  # for data files
        return load_task(TaskConfig(**opening["task"]), load_tokenizer(opening["tokenizer"]))
