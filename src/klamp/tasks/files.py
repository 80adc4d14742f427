"""Tasks from data files: a .jsonl, .json or .parquet file, or a data set of the hub, with one prompt per row."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klamp.errors import DataError, brief, missing_library, unknown_name
from klamp.files import at_home, json_of
from klamp.tasks.base import ARITHMETIC_TASK, HUB, Example, Task, TaskConfig, short_name
from klamp.tasks.prompts import prompt_text
from klamp.tasks.rewards import exact_match, with_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")

_HELD_OUT_SHARE = 10
"""Without a file of held-out rows, one row in this many is held out, for each skill."""


def file_task(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Load the task of a data file.

    Raises:
        DataError: a file or row that cannot be used.
        UnknownNameError: no file of this name, and no task either.
    """
    held_out = read_rows(config.eval_split) if config.eval_split else None
    return rows_task(read_rows(config.task), config, tokenizer, held_out=held_out)


def rows_task(
    rows: Sequence[Row],
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: Sequence[Row] | None = None,
) -> Task:
    """The task of data rows.

    All rows that are not held out are trained on, whatever their skill; the most frequent skill counts as the RL skill.

    Args:
        rows: one prompt each.
        config: its columns, sizes, seed and reward are used.
        tokenizer: for the chat template.
        held_out: rows to evaluate on; None: a tenth of each skill's prompts, by a hash of their text, so that equal
            prompts never end up on both sides.
    """
    train = _examples(rows, config.task, config, tokenizer)
    if held_out is None:
        train, evaluated = split(train, config)
    else:
        evaluated = _examples(held_out, config.eval_split, config, tokenizer)
    if config.train_size:
        train = _sample(train, config.train_size, config.task_seed)
    rl_skill = Counter(example.skill for example in train).most_common(1)[0][0]
    task = Task(
        name=short_name(config.task),
        train=tuple(train),
        evaluation=_by_skill(evaluated, rl_skill, config),
        rl_skill=rl_skill,
        score=lambda example, text: exact_match(example, text) if example.answer.strip() else 0.0,
    )
    return task if config.reward else with_reward(task, "exact_match")


def read_rows(path: str) -> list[Row]:
    """Read the rows of a .jsonl, .json (a list of objects, or lines) or .parquet file, or of a data set of the hub.

    Raises:
        DataError: the file is missing, empty or unreadable, or a row is not an object.
        MissingLibrary: a data set of the hub, and no datasets.
        UnknownNameError: the name does not look like a data file at all.
    """
    if path.startswith(HUB):
        return _hub_rows(path)
    file = at_home(path)
    if file.suffix.lower() not in SUFFIXES:
        files = (f"PATH{suffix}" for suffix in SUFFIXES)
        known = (ARITHMETIC_TASK, f"{HUB}NAME", *files, "module:function")
        raise unknown_name("task", path, known)
    if not file.is_file():
        raise DataError(
            "the data file does not exist",
            got=path,
            why=f"looked for {file.absolute()}",
            fix="check the path; a relative one starts at the working directory",
        )
    rows = _parquet_rows(file) if file.suffix.lower() == ".parquet" else _json_rows(file)
    if not rows:
        raise DataError("the data file has no rows", got=path, why="there is nothing to train on", fix="fill the file")
    return rows


def _hub_rows(path: str) -> list[Row]:
    """The rows of a data set, which `datasets` downloads or finds in a folder; its split `train` if none is named."""
    name, config, split, *_ = [*path.removeprefix(HUB).split(":", 2), "", ""]
    try:
        from datasets import load_dataset  # comes with TRL and verl
    except ImportError as error:
        raise missing_library("datasets", by="a data set of the hub", instead="or name a file") from error
    try:
        return list(load_dataset(str(at_home(name)), config or None, split=split or "train"))  # pyright: ignore
    except Exception as error:  # a hub that is not reached, a name, a configuration or a split that is not there
        raise DataError(
            "the data set cannot be loaded",
            got=path,
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix=f"write {HUB}NAME:CONFIG:SPLIT ({HUB}NAME::SPLIT for the only configuration), NAME as on the hub or a "
            "folder that holds a copy",
        ) from error


def _json_rows(file: Path) -> list[Row]:
    """The objects of a .json or .jsonl file; an error names the row or the line."""
    rows: list[Row] = []
    place = str(file)
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() == ".json" and text.lstrip().startswith("["):
            for number, value in enumerate(json_of(text), start=1):
                place = f"row {number} of {file.name}"
                rows.append(_object(value))
        else:
            for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: a JSON text has other line ends
                place = f"line {number} of {file.name}: {brief(line)}"
                if line.strip():
                    rows.append(_object(json_of(line)))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(place, error) from error
    return rows


def _object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{brief(repr(value))} is not an object, and a row is made of named columns")
    return value


def _parquet_rows(file: Path) -> list[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing_library("pyarrow", by="a Parquet file", instead="or convert the file to JSONL") from error
    try:
        return parquet.read_table(file).to_pylist()
    except Exception as error:  # pyarrow has a dozen unrelated errors for a damaged file
        raise _unreadable(str(file), error) from error


def _unreadable(place: str, error: Exception) -> DataError:
    return DataError(
        "the data file cannot be read",
        got=place,
        why=f"{type(error).__name__}: {error}",
        fix="write one JSON object per line, a list of objects in a .json file, or a Parquet file",
    )


def _examples(rows: Sequence[Row], path: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Rows as examples, in the same order."""
    check_columns(rows, path, config)
    name = Path(path).name
    return [_example(row, f"row {i} of {name}", config, tokenizer) for i, row in enumerate(rows, start=1)]


def check_columns(rows: Sequence[Row], path: str, config: TaskConfig) -> None:
    """Refuse rows without a column that the configuration names.

    Raises:
        DataError: names the columns that are there.
    """
    present = sorted({key for row in rows for key in row})
    wanted = [config.prompt_column, config.skill_column, config.reference_length_column]
    # the default name of the answers may be absent; one that the user chose may not
    if config.answer_column != "answer":
        wanted.append(config.answer_column)
    for column in filter(None, wanted):
        if column not in present:
            raise DataError(
                f"{Path(path).name} has no column {column!r}",
                got=f"the columns {', '.join(present)}",
                why="the configuration names it",
                fix="set prompt_column, answer_column, skill_column or reference_length_column to a column there is",
            )


def _example(row: Row, where: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> Example:
    prompt, answer = row.get(config.prompt_column), row.get(config.answer_column)
    text = "" if answer is None else str(answer)
    skill = row.get(config.skill_column) if config.skill_column else "task"
    if skill is None:
        raise DataError(
            f"{where} has no skill",
            got=f"{config.skill_column} is empty",
            why="it would count towards no row of the evaluation table",
            fix="fill the column, or leave skill_column unset",
        )
    return Example(
        prompt=prompt_text(prompt, config, tokenizer, where=where),
        answer=text,
        skill=str(skill),
        fields={**row, "prompt": prompt, "answer": text},
        reference_length=_reference_length(row, where, config),
    )


def _reference_length(row: Row, where: str, config: TaskConfig) -> int | None:
    if not config.reference_length_column:
        return None
    value = row.get(config.reference_length_column)
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1 and value == int(value):
        return int(value)
    raise DataError(
        f"{where} has no usable reference length",
        got=f"{config.reference_length_column} = {value!r}",
        why="a KL budget is a threshold times a whole number of tokens, at least 1",
        fix="fill the column, or leave reference_length_column unset",
    )


def split(examples: Sequence[Example], config: TaskConfig) -> tuple[list[Example], list[Example]]:
    """Divide examples into training and evaluation: a tenth of each skill's, at most `eval_size`, is held out.

    Raises:
        DataError: a file of one prompt, or the same prompt over and over, which cannot be divided.
    """
    held_out: set[str] = set()
    ordered = sorted(examples, key=lambda e: e.skill)
    for _, group in groupby(ordered, key=lambda e: e.skill):
        prompts = sorted({e.prompt for e in group}, key=lambda p: _hash(p, config.task_seed))
        held_out.update(prompts[: min(config.eval_size, max(1, len(prompts) // _HELD_OUT_SHARE))])
    train = [e for e in examples if e.prompt not in held_out]
    if not train:
        raise DataError(
            "there are too few different prompts to hold some out",
            got=f"{len(held_out)} different prompts in {len(examples)} rows",
            why="evaluation needs prompts that are not trained on",
            fix="add rows, or name a file of held-out rows (eval_split)",
        )
    return train, [e for e in examples if e.prompt in held_out]


def _sample(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Choose `count` examples by a hash of their prompts, in the order of the file."""
    order = sorted(range(len(examples)), key=lambda i: _hash(examples[i].prompt, seed))
    return [examples[i] for i in sorted(order[:count])]


def _hash(prompt: str, seed: int) -> int:
    return zlib.crc32(f"{seed}/{prompt}".encode())


def _by_skill(examples: Iterable[Example], rl_skill: str, config: TaskConfig) -> dict[str, tuple[Example, ...]]:
    """Held-out examples per skill, the RL skill first, the others in the order in which they appear."""
    found: dict[str, list[Example]] = {rl_skill: []}
    for example in examples:
        found.setdefault(example.skill, []).append(example)
    if not found[rl_skill]:
        raise DataError(
            f"no held-out row is of the skill that is trained, {rl_skill!r}",
            got=f"the skills {', '.join(sorted(k for k, v in found.items() if v))}",
            why="there would be no telling whether training helped",
            fix="add such rows to the held-out file, or leave skill_column unset",
        )
    return {skill: tuple(_sample(rows, config.eval_size, config.task_seed)) for skill, rows in found.items()}
