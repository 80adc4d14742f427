"""Reads the folder of a klamp run: config.yaml, metrics.jsonl, completions.jsonl, answers.jsonl, summary.json."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from klamp.config import KLWarning
from klamp.diagnostics.history import Answer, Completion, History, Row, answer_of
from klamp.errors import without_credentials
from klamp.records.files import each_row, json_lines, json_object, unreadable, yaml_object
from klamp.records.in_order import by_step
from klamp.training.alarms import completion_of, settings_of
from klamp.training.config import TrainConfig, field_owners
from klamp.training.folders import ANSWERS, CAUTIONS, COMPLETIONS, CONFIG, METRICS_FILE, SUMMARY


def is_klamp_run(path: Path) -> bool:
    """Whether a folder is that of a klamp run."""
    return (path / CONFIG).is_file() and (path / METRICS_FILE).is_file()


def read_klamp_run(path: Path, *, hold: bool = True) -> History:
    """Read the history of a klamp run.

    Args:
        path: its folder.
        hold: whether the completions are held; else they are left unread.

    Raises:
        DataError: its files are damaged.
        ConfigError: its configuration is impossible in this version; fields that it does not know are passed over.
    """
    values, config = read_config(path)
    summary = json_object(path / SUMMARY) if (path / SUMMARY).is_file() else {}
    skill = summary.get("rl_skill")
    if not isinstance(skill, str | None):
        raise unreadable("the skill that is trained is no text", path / SUMMARY, why=f"it is a {type(skill).__name__}")
    settings = settings_of(config, rl_skill=skill)
    history = History(source="klamp run", settings=settings, config=values)
    for scores, row in each_row(json_lines(path / METRICS_FILE), path / METRICS_FILE, _rows_of):
        history.evaluations += [scores] if scores.metrics else []
        history.rows += [row] if row.metrics else []
    if (path / COMPLETIONS).is_file():
        found = read_completions(path / COMPLETIONS)
        if hold:
            history.add_completions(found)
        else:
            history.unread = by_step(found)
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
    values = yaml_object(path / CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLWarning)  # it was told when the run was started
        config = TrainConfig.from_flat({name: value for name, value in values.items() if name in field_owners()})
    shown = {name: without_credentials(value) if isinstance(value, str) else value for name, value in values.items()}
    return shown, config


def read_completions(path: Path) -> Iterator[Completion]:
    """The rows of a completions.jsonl, one at a time.

    Raises:
        DataError: when it comes to a damaged line.
    """
    return each_row(json_lines(path), path, lambda row: completion_of(int(row["step"]), row))


def read_answers(path: Path) -> list[Answer]:
    """Read the rows of an answers.jsonl.

    Raises:
        DataError: a damaged line.
    """
    return list(each_row(json_lines(path), path, answer_of))


def _rows_of(row: Mapping[str, Any]) -> tuple[Row, Row]:
    """The scores and the metrics in a line of metrics.jsonl; one of the two is empty, as klamp writes them."""
    step = int(row["step"])
    values = {name: float(value) for name, value in row.items() if name != "step"}
    scores = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    metrics = {name: value for name, value in values.items() if not name.startswith("eval/")}
    return Row(step=step, metrics=scores), Row(step=step, metrics=metrics)
