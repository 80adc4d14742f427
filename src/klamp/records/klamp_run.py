"""Reads the folder of a klamp run: config.yaml, metrics.jsonl, completions.jsonl, answers.jsonl, summary.json."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from klamp.config import KLWarning
from klamp.diagnostics.history import Answer, Completion, History, Row, answer_of
from klamp.records.files import json_lines, json_object, unreadable
from klamp.training.alarms import completion_of, settings_of
from klamp.training.config import TrainConfig, field_owners
from klamp.training.folders import ANSWERS, CAUTIONS, COMPLETIONS, CONFIG, METRICS_FILE, SUMMARY


def is_klamp_run(path: Path) -> bool:
    """Whether a folder is that of a klamp run."""
    return (path / CONFIG).is_file() and (path / METRICS_FILE).is_file()


def read_klamp_run(path: Path) -> History:
    """Read the history of a klamp run.

    Raises:
        DataError: its files are damaged.
        ConfigError: its configuration is impossible in this version; fields that it does not know are passed over.
    """
    values, config = read_config(path)
    summary = json_object(path / SUMMARY) if (path / SUMMARY).is_file() else {}
    settings = settings_of(config, rl_skill=summary.get("rl_skill"))
    history = History(source="klamp run", settings=settings, config=values)
    for _ in _each(path / METRICS_FILE, lambda row: _add(history, row)):
        pass
    if (path / COMPLETIONS).is_file():
        history.add_completions(read_completions(path / COMPLETIONS))
    if (path / ANSWERS).is_file():
        history.answers += read_answers(path / ANSWERS)
    if (path / CAUTIONS).is_file():  # a resumed run says them again
        history.cautions += dict.fromkeys(str(row.get("text", "")) for row in json_lines(path / CAUTIONS))
    return history


def read_config(path: Path) -> tuple[dict[str, Any], TrainConfig]:
    """The configuration of a klamp run: as it was written, and as this version reads it.

    Raises:
        DataError: it is no YAML.
        ConfigError: it is impossible in this version; fields that it does not know are passed over.
    """
    import yaml

    try:
        values = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise unreadable("the configuration of a run is not YAML", path / CONFIG, why=str(error)) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # it was told when the run was started
        return values, TrainConfig.from_flat({name: value for name, value in values.items() if name in field_owners()})


def read_completions(path: Path) -> list[Completion]:
    """Read the rows of a completions.jsonl.

    Raises:
        DataError: a damaged line.
    """
    return list(_each(path, lambda row: completion_of(int(row["step"]), row)))


def read_answers(path: Path) -> list[Answer]:
    """Read the rows of an answers.jsonl.

    Raises:
        DataError: a damaged line.
    """
    return list(_each(path, answer_of))


def _each(path: Path, read: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """What each line of a file becomes.

    Raises:
        DataError: one that cannot be read so.
    """
    for number, row in enumerate(json_lines(path), start=1):
        try:
            yield read(row)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise unreadable(f"line {number} is damaged", path, why=why) from error


def _add(history: History, row: Mapping[str, Any]) -> None:
    step = int(row["step"])
    values = {name: float(value) for name, value in row.items() if name != "step"}
    scores = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    metrics = {name: value for name, value in values.items() if not name.startswith("eval/")}
    if scores:
        history.evaluations.append(Row(step=step, metrics=scores))
    if metrics:
        history.rows.append(Row(step=step, metrics=metrics))
