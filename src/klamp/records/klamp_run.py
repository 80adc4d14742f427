"""Reads the folder of a klamp run: config.yaml, metrics.jsonl, completions.jsonl, answers.jsonl, summary.json; and
finds the runs of a sweep's folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.config.describe import describe_anchors
from klamp.diagnostics.doctor import ABOUT
from klamp.diagnostics.history import History, Row, answer_of
from klamp.errors import without_credentials
from klamp.records.files import each_row, json_lines, object_in, unreadable
from klamp.records.trl_run import folder_of
from klamp.training.config import TrainConfig
from klamp.training.folders import ANSWERS, CAUTIONS, COMPLETIONS, CONFIG, METRICS_FILE, RUNS, SUMMARY, VERSIONS
from klamp.training.observers import completion_of, settings_of
from klamp.training.resumed import config_of, in_force, told


def is_klamp_run(path: Path) -> bool:
    """Whether a folder is that of a klamp run."""
    return (path / CONFIG).is_file() and (path / METRICS_FILE).is_file()


def read_klamp_run(path: Path) -> History:
    """Read the history of a klamp run.

    Args:
        path: its folder.

    Raises:
        DataError: its files are damaged.
        ConfigError: its configuration is impossible in this version; fields that it does not know are passed over.
    """
    values, config = read_config(path)
    written = object_in(path / CONFIG)
    summary = object_in(path / SUMMARY) if (path / SUMMARY).is_file() else {}
    skill = summary.get("rl_skill")
    if not isinstance(skill, str | None):
        raise unreadable("the skill that is trained is no text", path / SUMMARY, why=f"it is a {type(skill).__name__}")
    history = History(source="klamp run", settings=settings_of(config, rl_skill=skill), config=values)
    history.changes = told(written)
    history.former = [
        (step, settings_of(config_of(in_force(written, step)), rl_skill=skill)) for step in history.changes
    ]
    for scores, row in each_row(json_lines(path / METRICS_FILE), path / METRICS_FILE, _rows_of):
        history.evaluations += [scores] if scores.metrics else []
        history.rows += [row] if row.metrics else []
    if (path / COMPLETIONS).is_file():
        rows, read = json_lines(path / COMPLETIONS), lambda row: completion_of(int(row["step"]), row)
        history.add_completions(each_row(rows, path / COMPLETIONS, read))
    if (path / ANSWERS).is_file():
        history.answers += each_row(json_lines(path / ANSWERS), path / ANSWERS, answer_of)
    if (path / CAUTIONS).is_file():  # a resumed run says them again
        history.cautions += dict.fromkeys(str(row.get("text", "")) for row in json_lines(path / CAUTIONS))
    return history


def read_config(path: Path, step: float = math.inf) -> tuple[dict[str, Any], TrainConfig]:
    """The configuration of a klamp run: as it was written, and as this version reads it.

    Args:
        path: its folder.
        step: in which it was in force; by default the last.

    Raises:
        DataError: it is no YAML.
        ConfigError: it is impossible in this version; fields that it does not know are passed over.
    """
    values = in_force(object_in(path / CONFIG), step)
    shown = {name: without_credentials(value) if isinstance(value, str) else value for name, value in values.items()}
    return shown, config_of(values)


def _rows_of(row: Mapping[str, Any]) -> tuple[Row, Row]:
    """The scores and the metrics in a line of metrics.jsonl; one of the two is empty, as klamp writes them."""
    step = int(row["step"])
    values = {name: float(value) for name, value in row.items() if name != "step"}
    scores = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    metrics = {name: value for name, value in values.items() if not name.startswith("eval/")}
    return Row(step=step, metrics=scores), Row(step=step, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class Details:
    """What is known of a run besides its history; empty where its folder is not klamp's."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Name of a package -> its version."""
    words: Sequence[str] = ()
    """Its model, task and KL."""
    when: float | None = None
    """When it was last written to, in seconds since 1970."""
    seconds: float | None = None
    """How long it took; None: it has not ended."""


def read_details(path: Path) -> Details:
    """Read the facts of a run that stand beside its history.

    Raises:
        DataError: a damaged file.
    """
    if not (path.is_dir() and is_klamp_run(path)):
        return _of_trl(path)
    config = read_config(path)[1]
    summary = object_in(path / SUMMARY) if (path / SUMMARY).is_file() else {}
    reward = f", reward {config.task.reward}" if config.task.reward else ""
    versions = object_in(path / VERSIONS) if (path / VERSIONS).is_file() else {}
    return Details(
        versions={name: str(version) for name, version in versions.items()},
        words=(config.model.model, f"{config.task.task}{reward}", describe_anchors(config.kl, config.teacher)),
        when=(path / METRICS_FILE).stat().st_mtime,
        seconds=summary.get("seconds"),
    )


def _of_trl(path: Path) -> Details:
    """What klamp's callback wrote beside TRL's log; nothing where there was none."""
    folder = folder_of(path)
    if folder is None:
        return Details()
    told = object_in(folder / ABOUT)
    return Details(
        versions=told.get("versions") or {},
        words=tuple(str(told.get(name, "")) for name in ("model", "task", "kl")),
        when=(folder / ABOUT).stat().st_mtime,
        seconds=told.get("seconds"),
    )


def runs_in(path: Path) -> tuple[list[Path], list[Path]]:
    """The runs in a sweep's folder, by name, and the folders there that hold no run; nothing for any other folder.

    Args:
        path: a folder, or anything else.
    """
    if not path.is_dir() or is_klamp_run(path) or not (path / RUNS).is_dir():
        return [], []
    folders = sorted((folder for folder in (path / RUNS).iterdir() if folder.is_dir()), key=_in_order)
    good = [folder for folder in folders if is_klamp_run(folder)]
    return good, [folder for folder in folders if folder not in good] if good else []


def _in_order(folder: Path) -> list[tuple[float, str]]:
    """A key that sorts names by the numbers in them: beta-0 before beta-0.01 before beta-0.1."""
    parts = re.split(r"(\d+(?:\.\d+)?)", folder.name)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]
