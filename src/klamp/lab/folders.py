"""The folder of a run: path, lines, checkpoints, configuration and lock; files that are whole at any time."""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from klamp.doctor.readers.files import object_in
from klamp.doctor.readers.klamp_run import HISTORY, UNTIL, changes_of, history_of, in_force, shown
from klamp.errors import KLWarning, RunFolderError
from klamp.files import at_home, json_of, with_end
from klamp.lab.config import TrainConfig, field_owners
from klamp.lab.tasks.base import short_name
from klamp.names import CONFIG, OUTCOME, SUMMARY

CHECKPOINTS = "checkpoints"  # the folder inside a run's folder that holds one folder per checkpoint
SEAL = "checksums.json"  # the file in a checkpoint that holds its checksums; where it is, the checkpoint was complete
POLICY = "policy"  # the folder inside a checkpoint of klamp's that holds its weights
OWN = "step-"  # how the names of the checkpoints of klamp's own loop begin
NAMED = re.compile(r"(step-|checkpoint-|global_step_)\d+", re.ASCII)  # a checkpoint; a copy beside it has another name
LOCK = ".lock"  # the file by which a folder is locked
BESIDE = ("log.txt", OUTCOME)  # the files that `klamp ablate` keeps in a run's folder
FOR_VERL = "verl"  # the folder inside a run's folder that holds what klamp and verl tell each other
BEGUN = (*BESIDE, LOCK, f".{CONFIG}.part", FOR_VERL)
"""Files in the folder of a run that was killed before it had anything to lose."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects in a JSONL file, one a line; lines that hold no object, as a killed process leaves, are left out."""
    if not file.exists():
        return []
    rows = map(row_of, with_end(file).read_text(encoding="utf-8", errors="replace").splitlines())
    return [row for row in rows if row is not None]


def row_of(line: str) -> dict[str, Any] | None:
    """The object in a line of JSON; None if it holds no object."""
    with suppress(ValueError, RecursionError):
        return row if isinstance(row := json_of(line), dict) else None
    return None


def step_of(row: Mapping[str, Any] | None) -> float:
    """The step of a row; infinite if it has no step."""
    step = None if row is None else row.get("step")
    return step if isinstance(step, int | float) else math.inf


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in the folder of a run, oldest first: klamp's own (step-N) and verl's (global_step_N) are in
    `checkpoints`, TRL's (checkpoint-N) beside it."""
    paths = [*(folder / CHECKPOINTS).glob("*"), *folder.glob("checkpoint-*")]
    return sorted((path for path in paths if NAMED.fullmatch(path.name) and path.is_dir()), key=number_of)


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run of klamp's own loop, oldest first."""
    return [folder for folder in checkpoint_folders(output_dir) if folder.name.startswith(OWN)]


def newest_complete(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run (TRL's are complete once they have checksums); None if it has none."""
    paths = reversed(checkpoint_folders(folder))
    return next((path for path in paths if not path.name.startswith("checkpoint-") or (path / SEAL).is_file()), None)


def newest_policy(folder: Path) -> Path | None:
    """The model (or adapter; verl's is in shards) in a run's newest complete checkpoint; None if it has none."""
    newest = newest_complete(folder)
    return newest and policy_in(newest)


def policy_in(checkpoint: Path) -> Path:
    """The model (or adapter) in one of the `checkpoint_folders`."""
    inside = {"step": POLICY, "global": "actor/huggingface"}
    return checkpoint / inside.get(re.split("[-_]", checkpoint.name)[0], "")


def policy_folder(name: str) -> str:
    """The folder of the weights if klamp's checkpoint is named; any other folder or hub id unchanged."""
    inside = at_home(name) / POLICY
    return str(inside) if inside.is_dir() and not (inside.parent / "config.json").exists() else name


def number_of(checkpoint: Path) -> int:
    """The number that a checkpoint's name ends with: steps, or for TRL's updates."""
    return int(re.split("[-_]", checkpoint.name)[-1])


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def tidy(output_dir: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed run left half written."""
    for folder in (*(output_dir / CHECKPOINTS).glob(f".{OWN}*"), *checkpoints(output_dir)[:-keep]):
        shutil.rmtree(folder, ignore_errors=True)


def plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain data for YAML and trackers: lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.flat().items()}


def config_of(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that a config.yaml holds; fields that this version does not have are left out."""
    with warnings.catch_warnings(action="ignore", category=KLWarning):  # the run gave it when it was started
        return TrainConfig.from_flat({name: value for name, value in values.items() if name in field_owners()})


def read(folder: Path) -> dict[str, Any]:
    """All fields of a run's config.yaml, missing ones at their defaults, and its history."""
    values = object_in(folder / CONFIG)
    return plain(config_of(values)) | ({HISTORY: entries} if (entries := history_of(values)) else {})


def read_config(path: Path, step: float = math.inf) -> tuple[dict[str, Any], TrainConfig]:
    """The configuration of a klamp run in a step (the last by default), as written and as this version reads it."""
    values = in_force(object_in(path / CONFIG), step)
    return shown(values), config_of(values)


def with_history(config: TrainConfig, past: Mapping[str, Any], step: int) -> dict[str, Any]:
    """What config.yaml holds from a resume after `step` on; entries of `past` (see `read`) of later steps are gone."""
    now = plain(config) | {"resume": False}
    entries = [entry for entry in history_of(past) if entry[UNTIL] < step]
    if changes := changes_of(in_force(past, step), now):
        entries.append({UNTIL: step, **{name: old for name, (old, _) in changes.items()}})
    return now | ({HISTORY: entries} if entries else {})


def run_folder(config: TrainConfig) -> Path:
    """The path of the folder that a run will write; nothing is created."""
    name = config.run.output_dir
    folder = Path(name) if name else free_folder(Path("runs"), short_name(config.task.task) or "run")
    check_folder(folder, resume=config.run.resume)
    above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise unwritable(folder, f"{above} is {'not yours to write into' if above.is_dir() else 'a file'}")
    return folder


def make_folder(config: TrainConfig) -> tuple[Path, bool]:
    """Make the folder that a run will write, in one step that only one process can win; and whether it was new."""
    name = config.run.output_dir
    while not (name and Path(name).is_dir()):  # its content is checked once no other process can write there
        folder = run_folder(config)
        try:
            folder.mkdir(parents=True)
            return folder, True
        except FileExistsError:  # another process was faster
            continue
        except (OSError, ValueError) as error:  # a name with a NUL, which a YAML file can hold
            raise unwritable(folder, error) from error
    return Path(name), False


@contextmanager
def opened_folder(config: TrainConfig) -> Iterator[Path]:
    """The folder of the run, locked; it goes again if the run was refused before it wrote anything."""
    folder, made = make_folder(config)
    try:
        with held(folder, by="klamp train"):
            check_folder(folder, resume=config.run.resume)  # another run may have been here since it was made
            yield folder
    finally:
        with suppress(OSError):
            if made:
                folder.rmdir()


def free_folder(root: Path, name: str) -> Path:
    """The first of root/name-001, root/name-002, ... that does not exist."""
    return next(folder for i in range(1, 10**6) if not os.path.lexists(folder := root / f"{name}-{i:03d}"))


def check_folder(folder: Path, *, resume: bool) -> None:
    """Refuse to write over another run, or to continue one that is not there."""
    exists, inside = os.path.lexists(folder), list(folder.iterdir()) if folder.is_dir() else []
    full = not all(path.name in BEGUN or (path.name == CHECKPOINTS and not any(path.iterdir())) for path in inside)
    is_run = (folder / CONFIG).exists()
    if exists and not folder.is_dir():
        what = f"the output folder is {'a file' if folder.exists() else 'a link that leads nowhere'}"
        why, fix = "a run writes several files into a folder", "choose another --output_dir"
    elif full and not resume:
        what = f"the output folder holds {'another run' if is_run else 'other files'}"
        ended = (folder / SUMMARY).exists() or not is_run
        why = "a run never writes over what is there" + ("" if ended else "; that run has not reached its last step")
        fix = "choose another --output_dir, delete the folder, or continue that run with --resume"
    elif resume and not is_run and (full or not exists):
        what, why = "there is no run to continue in the output folder", f"it has no {CONFIG}"
        fix = "check --output_dir, or leave --resume out"
    else:
        return
    raise RunFolderError(what, got=str(folder), why=why, fix=fix)


def unwritable(folder: Path, cause: Exception | str) -> RunFolderError:
    """The error for the folder of a run that cannot be written, before its first step or any more."""
    why = cause if isinstance(cause, str) else f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    fix = "make room, or choose another --output_dir; --resume continues from a checkpoint that is there"
    return RunFolderError("the output folder cannot be written", got=str(folder), why=why, fix=fix)


def part_of(file: Path) -> Path:
    """Where a file or folder is written before it is moved to its place."""
    return file.with_name(f".{file.name}.part")


def write_whole(file: Path, text: str) -> None:
    """Write a text beside a file and move it to its place, once it is on the disk."""
    part = part_of(file)
    with part.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; not on Windows, which opens no folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def held(folder: Path, *, by: str) -> Iterator[None]:
    """A context in which no other process can take the folder; `by` is the command, as a person types it."""
    from filelock import FileLock, Timeout  # part of the extra `train`; who only reads a run needs no lock

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        why, fix = f"{by} would write the same files", "wait for it, stop it, or choose another --output_dir"
        raise RunFolderError("another process works in the output folder", got=str(folder), why=why, fix=fix) from error
    except OSError as error:
        raise unwritable(folder, f"it cannot be locked: {type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink(missing_ok=True)  # while it is locked: whoever opened it meanwhile tries again
        with suppress(OSError):
            lock.release()
