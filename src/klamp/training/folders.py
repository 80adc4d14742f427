"""The folder that a run writes: the next free one, or the given one if no other run is in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from klamp.errors import RunFolderError
from klamp.tasks.files import json_of
from klamp.training.config import TrainConfig
from klamp.training.lock import LOCK
from klamp.training.whole_files import part_of

Row: TypeAlias = Mapping[str, Any]
Read = TypeVar("Read")

CONFIG = "config.yaml"
"""The file by which the folder of a run is known."""
METRICS_FILE, COMPLETIONS, ANSWERS = "metrics.jsonl", "completions.jsonl", "answers.jsonl"
CAUTIONS = "cautions.jsonl"
VERSIONS, SUMMARY = "versions.json", "summary.json"
"""What else it writes."""
SCORE = "eval/"
"""How the name of a skill's score begins in metrics.jsonl."""
CHECKPOINTS = "checkpoints"
"""The folder inside a run's folder that holds one folder per checkpoint."""
NAMED = re.compile(r"(step-|checkpoint-|global_step_)\d+", re.ASCII)
"""The name of a checkpoint; a copy or a backup that somebody made beside it has another one."""
BESIDE = ("run.json", "log.txt", "outcome.json")
"""The files that `klamp ablate` keeps in a run's folder."""
FOR_VERL = "verl"
"""The folder inside a run's folder that holds what klamp and verl tell each other."""
BEGUN = (*BESIDE, LOCK, part_of(Path(CONFIG)).name, FOR_VERL)
"""What may lie in the folder of a run that was killed before anything could be lost with it."""
RUNS = "runs"
"""The folder inside an ablation's folder that holds one folder per run."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of one of these files, one a line; none where the file does not exist.

    A line that is none, as a killed process leaves, is passed over.
    """
    if not file.exists():
        return []
    rows = map(row_of, file.read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def each_readable(rows: Iterable[Row], read: Callable[[Row], Read]) -> list[Read]:
    """What lines of one of these files become, without those that miss a value or hold one of another type."""
    found: list[Read] = []
    for row in rows:
        with suppress(LookupError, TypeError, ValueError, ArithmeticError):
            found.append(read(row))
    return found


def lines_until(file: Path, step: int) -> list[dict[str, Any]]:
    """Those of them that speak of a step up to this one."""
    return [row for row in lines_of(file) if step_of(row) <= step]


def step_of(row: Mapping[str, Any] | None) -> float:
    """The step that a line speaks of; infinite where it names none."""
    step = None if row is None else row.get("step")
    return step if isinstance(step, int | float) else float("inf")


def scores_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The scores of an evaluation in a line of metrics.jsonl: skill -> score; none in the line of a step."""
    scores = {name.removeprefix(SCORE): row[name] for name in row if name.startswith(SCORE)}
    # A damaged line has others than numbers.
    return {name: score for name, score in scores.items() if isinstance(score, int | float)}


def row_of(line: str) -> dict[str, Any] | None:
    """The object in a line of one of these files; None where it holds none."""
    try:
        row = json_of(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in the folder of a run, oldest first: klamp's own (step-N), TRL's (checkpoint-N) or verl's
    (global_step_N).

    Args:
        folder: of the run.
    """
    inside = (folder / CHECKPOINTS).glob("*")
    return sorted((each for each in inside if NAMED.fullmatch(each.name) and each.is_dir()), key=number_of)


def number_of(checkpoint: Path) -> int:
    """The number that a checkpoint's folder ends with: steps, or for TRL's updates."""
    return int(re.split("[-_]", checkpoint.name)[-1])


def run_folder(config: TrainConfig) -> Path:
    """The path of the folder that a run will write; nothing is created.

    Raises:
        RunFolderError: it holds another run, or there is none to continue.
    """
    name = Path(config.task.task).stem.replace(":", "-") or "run"
    given = config.run.output_dir
    folder = Path(given) if given else free_folder(Path("runs"), name)
    check_folder(folder, resume=config.run.resume)
    return folder


def make_folder(config: TrainConfig) -> tuple[Path, bool]:
    """Make the folder that a run will write, in one step that only one process can win; and whether it was new.

    Raises:
        RunFolderError: it holds another run, there is none to continue, or it cannot be made.
    """
    while True:
        given = config.run.output_dir
        if given and Path(given).is_dir():  # what it holds is looked at once nobody else can write there
            _check_writable(Path(given))
            return Path(given), False
        folder = run_folder(config)
        try:
            folder.mkdir(parents=True)
            return folder, True
        except FileExistsError:  # another process was faster
            continue
        except (OSError, ValueError) as error:  # a name with a NUL, which a YAML file can hold
            raise unwritable(folder, f"{type(error).__name__}: {error}") from error


def free_folder(root: Path, name: str) -> Path:
    """The first of root/name-001, root/name-002, ... that does not exist."""
    return next(folder for i in range(1, 10**6) if not os.path.lexists(folder := root / f"{name}-{i:03d}"))


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuse to write over another run, or to continue one that is not there.

    Raises:
        RunFolderError: the folder holds a run (or anything else) and resume is off; or resume is on and it holds none;
            or it could not be made or written here.
    """
    _check_writable(folder)
    held = folder.is_dir() and any(not _is_begun(each) for each in folder.iterdir())
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunFolderError(
            f"the output folder is {'a file' if folder.exists() else 'a link that leads nowhere'}",
            got=str(folder),
            why="a run writes several files into a folder",
            fix="choose another --output_dir",
        )
    if held and not resume:
        what = "another run" if (folder / CONFIG).exists() else "other files"
        raise RunFolderError(
            f"the output folder holds {what}",
            got=str(folder),
            why="a run never writes over what is there",
            fix="choose another --output_dir, delete the folder, or continue that run with --resume",
        )
    if resume and (held or not folder.exists()) and not (folder / CONFIG).exists():
        raise RunFolderError(
            "there is no run to continue in the output folder",
            got=str(folder),
            why=f"it has no {CONFIG}",
            fix="check --output_dir, or leave --resume out",
        )


def _is_begun(path: Path) -> bool:
    """Whether a file or folder may lie in that of a run which was killed while it was loading."""
    return path.name in BEGUN or (path.name == CHECKPOINTS and not any(path.iterdir()))


def _check_writable(folder: Path) -> None:
    """Refuse a folder that lies under a file, or where this user may not write."""
    nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    if nearest == folder.absolute() and not nearest.is_dir():
        return  # named by the caller: it is a file itself
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise unwritable(
            folder, f"{nearest} is a file" if not nearest.is_dir() else f"no permission to write into {nearest}"
        )


def lost(folder: Path, error: Exception) -> RunFolderError:
    """The error for the folder of a run under way that cannot be written any more."""
    return RunFolderError(
        "the folder of the run cannot be written any more",
        got=str(folder),
        why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        fix="make room or put the folder back, then continue with --resume",
    )


def unwritable(folder: Path, why: str) -> RunFolderError:
    """The error for an output folder that cannot be written."""
    return RunFolderError(
        "the output folder cannot be written", got=str(folder), why=why, fix="choose another --output_dir"
    )
