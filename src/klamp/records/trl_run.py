"""Reads what `klamp.trl.ReportCallback` has left beside the log of a TRL run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from klamp.diagnostics.doctor import ABOUT
from klamp.diagnostics.history import History, answer_of
from klamp.diagnostics.names import settings_of
from klamp.errors import without_credentials
from klamp.records.files import each_row, json_lines, object_in
from klamp.training.folders import ANSWERS, COMPLETIONS
from klamp.training.observers import completion_of

SAID = ("beta", "loss_type", "scale_rewards")
"""Settings that the arguments of a run say, and its log does not."""


def folder_of(path: Path) -> Path | None:
    """The folder with what the callback wrote, for that of a run or of one of its checkpoints; None: there is none."""
    return next((folder for folder in (path, path.parent) if (folder / ABOUT).is_file()), None)


def with_report(history: History, path: Path) -> History:
    """A history with the completions, answers and settings that the callback has written.

    Raises:
        DataError: a damaged file.
    """
    folder = folder_of(path)
    if folder is None:
        return history
    config: dict[str, Any] = object_in(folder / ABOUT).get("config") or {}
    history.config = {n: without_credentials(x) if isinstance(x, str) else x for n, x in config.items()}
    said = settings_of(history.config, set())
    known = {name: getattr(said, name) for name in SAID if getattr(history.settings, name) is None}
    history.settings = replace(history.settings, **known)
    if (file := folder / COMPLETIONS).is_file():
        read = each_row(json_lines(file), file, lambda row: completion_of(int(row["step"]), row))
        history.add_completions(read)
    if (file := folder / ANSWERS).is_file():
        history.answers += each_row(json_lines(file), file, answer_of)
    return history
