"""Reads the folder of a klamp run or of a sweep, and what ReportCallback writes beside TRL's log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from klamp.doctor.history import Details, History, Row, answer_of
from klamp.doctor.metrics import settings_of, settings_of_run
from klamp.doctor.readers.files import each_row, json_lines, object_in, unreadable
from klamp.doctor.readers.rollouts import completion_of
from klamp.errors import without_credentials
from klamp.names import ABOUT, ANSWERS, CAUTIONS, COMPLETIONS, CONFIG, METRICS_FILE, REPORT, RUNS, SUMMARY, VERSIONS

HISTORY, UNTIL = "history", "until"
PLACE = ("output_dir", "resume")
"""Fields that say where a run is."""
SAID = ("beta", "loss_type", "scale_rewards")
"""Settings that the arguments of a TRL run say, and its log does not."""
UNFINISHED = f"the run has no {SUMMARY}: it is still running, or it ended before its last step"
NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
"""Sorts names by the numbers in them: beta-0 before beta-0.01 before beta-0.1."""


def is_klamp_run(path: Path) -> bool:
    """Whether a folder holds a klamp run."""
    return (path / CONFIG).is_file() and (path / METRICS_FILE).is_file()


def read_klamp_run(path: Path) -> History:
    """Read the history of a klamp run from its folder."""
    values_and_history = object_in(path / CONFIG)
    values, changes = in_force(values_and_history), describe_changes(values_and_history)
    summary, versions = (object_in(path / file) if (path / file).is_file() else {} for file in (SUMMARY, VERSIONS))
    skill = summary.get("rl_skill")
    if not isinstance(skill, str | None):
        raise unreadable("the skill that is trained is no text", path / SUMMARY, why=f"it is a {type(skill).__name__}")
    settings = settings_of_run(values, rl_skill=skill)
    versions, when = {name: str(version) for name, version in versions.items()}, (path / METRICS_FILE).stat().st_mtime
    details = Details(versions=versions, when=when, seconds=summary.get("seconds"))
    history = History(source="klamp run", settings=settings, config=shown(values), details=details, changes=changes)
    for scores, row in each_row(json_lines(path / METRICS_FILE), path / METRICS_FILE, _rows_of):
        history.evaluations += [scores] if scores.metrics else []
        history.rows += [row] if row.metrics else []
    add_tokens(history, path)
    if (path / CAUTIONS).is_file():  # a resumed run says them again
        history.cautions += dict.fromkeys(str(row.get("text", "")) for row in json_lines(path / CAUTIONS))
    history.cautions += [] if summary else [UNFINISHED]
    return history


def add_tokens(history: History, folder: Path) -> None:
    """Add the completions and the answers of evaluations that a klamp run, or ReportCallback in TRL, wrote."""
    if (file := folder / COMPLETIONS).is_file():
        rows = each_row(json_lines(file), file, lambda row: completion_of(row, step=row["step"], written=True))
        history.add_completions(rows)
    if (file := folder / ANSWERS).is_file():
        history.answers += each_row(json_lines(file), file, answer_of)


def shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration, without passwords in addresses."""
    return {name: without_credentials(value) if isinstance(value, str) else value for name, value in values.items()}


def _rows_of(row: Mapping[str, Any]) -> tuple[Row, Row]:
    """The scores and the metrics in a line of metrics.jsonl; one of the two is empty, as klamp writes them."""
    step = int(row["step"])
    values = {name: float(value) for name, value in row.items() if name != "step"}
    scores = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    metrics = {name: value for name, value in values.items() if not name.startswith("eval/")}
    return Row(step=step, metrics=scores), Row(step=step, metrics=metrics)


def with_report(history: History, path: Path) -> History:
    """The history of a TRL run with what ReportCallback wrote beside its log."""
    folders = (path, path.parent, path / REPORT, path.parent / REPORT)
    folder = next((folder for folder in folders if (folder / ABOUT).is_file()), None)
    if folder is None:
        return history
    about = object_in(folder / ABOUT)
    history.config = shown(about.get("config") or {})
    history.details = Details(
        versions=about.get("versions") or {},
        words=tuple(str(about.get(name, "")) for name in ("model", "task", "kl")),
        when=(folder / ABOUT).stat().st_mtime,
        seconds=about.get("seconds"),
    )
    settings = settings_of(history.config, set())
    additions = {name: getattr(settings, name) for name in SAID if getattr(history.settings, name) is None}
    history.settings = replace(history.settings, **additions)
    add_tokens(history, folder)
    return history


def runs_in(path: Path) -> tuple[list[Path], list[Path]]:
    """The runs in a sweep's folder, by name, and the folders there that hold no run; nothing for any other path."""
    if not path.is_dir() or is_klamp_run(path) or not (path / RUNS).is_dir():
        return [], []
    folders = sorted(
        (folder for folder in (path / RUNS).iterdir() if folder.is_dir()),
        key=lambda folder: [float(x) if x[:1].isdigit() else x for x in NUMBER.split(folder.name)],
    )
    good = [folder for folder in folders if is_klamp_run(folder)]
    return good, [folder for folder in folders if folder not in good] if good else []


def history_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a config.yaml's history, in order: values, and the last step in which they were in force."""
    entries = history if isinstance(history := values.get(HISTORY), list) else []
    dated = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get(UNTIL), int)]
    return sorted(dated, key=lambda entry: entry[UNTIL])


def in_force(values: Mapping[str, Any], step: float = math.inf) -> dict[str, Any]:
    """The fields of a config.yaml in a step (from 1), or now; without the history."""
    fields = {name: value for name, value in values.items() if name != HISTORY}
    for entry in reversed(history_of(values)):
        if entry[UNTIL] >= step:
            fields |= {name: value for name, value in entry.items() if name in fields}
    return fields


def describe_changes(values: Mapping[str, Any]) -> dict[int, str]:
    """Step -> what was changed after it, in words; from the values of a config.yaml."""
    after, changes = in_force(values), dict[int, str]()
    for step, entries in groupby(reversed(history_of(values)), key=lambda entry: entry[UNTIL]):
        before = dict(after)
        for entry in entries:
            before |= {name: value for name, value in entry.items() if name in after}
        changes[step] = in_words(changes_of(before, after))
        after = before
    return dict(sorted(changes.items()))


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> its value in one configuration and in another, where the two differ."""
    return {name: (before[name], now[name]) for name in before if name not in PLACE and before[name] != now[name]}


def in_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Changes as text: `beta 0.1 -> 0.5`."""
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())
