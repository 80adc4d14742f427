"""What lies beside the record of a run: versions, scores, default values; and the runs of a sweep's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klamp.records.files import each_row, json_object
from klamp.records.klamp_run import is_klamp_run
from klamp.training.config import TrainConfig
from klamp.training.folders import RUNS, SUMMARY, VERSIONS


@dataclass(frozen=True, kw_only=True)
class Details:
    """What is known of a run besides its history; empty where its folder is not klamp's, or it did not end."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Field of the configuration -> its default in this version."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Name of a package -> its version."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Skill -> score before training."""
    after: Mapping[str, float] = field(default_factory=dict)
    """Skill -> score after training."""


def read_details(path: Path) -> Details:
    """Read the versions, scores and defaults that lie beside a record.

    Raises:
        DataError: a damaged file.
    """
    if not (path.is_dir() and is_klamp_run(path)):
        return Details()
    summary = json_object(path / SUMMARY) if (path / SUMMARY).is_file() else {}
    return Details(
        defaults=json.loads(json.dumps(TrainConfig().flat())),
        versions=read_versions(path),
        before=_scores(summary, "before", path / SUMMARY),
        after=_scores(summary, "after", path / SUMMARY),
    )


def read_versions(path: Path) -> dict[str, str]:
    """The versions of packages that stand in the folder of a klamp run; none where they are not recorded.

    Raises:
        DataError: a damaged file.
    """
    versions = json_object(path / VERSIONS) if (path / VERSIONS).is_file() else {}
    return {name: str(version) for name, version in versions.items()}


def _scores(summary: Mapping[str, Any], when: str, path: Path) -> dict[str, float]:
    found = summary.get(when)
    if not isinstance(found, dict):
        return {}
    (scores,) = each_row([found], path, _numbers, what=f"the scores {when} training are damaged")
    return scores


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(score) for name, score in found.items()}


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
