"""The folder of a run: which one it is, what is in it, who may write it; and files that are whole at any time."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from klamp.errors import RunFolderError
from klamp.files import at_home, json_of, with_end
from klamp.lab.config import TrainConfig
from klamp.lab.tasks.base import short_name
from klamp.names import CONFIG, OUTCOME

Row: TypeAlias = Mapping[str, Any]
Read = TypeVar("Read")

SCORE = "eval/"  # how the name of a skill's score begins in metrics.jsonl
CHECKPOINTS = "checkpoints"  # the folder inside a run's folder that holds one folder per checkpoint
SEAL = "checksums.json"  # the file in a checkpoint that holds its checksums; where it is, the checkpoint was complete
POLICY = "policy"  # the folder inside a checkpoint of klamp's that holds its weights
OWN = "step-"  # how the names of the checkpoints of klamp's own loop begin
NAMED = re.compile(r"(step-|checkpoint-|global_step_)\d+", re.ASCII)  # a checkpoint; a copy beside it has another name
LOCK = ".lock"  # the file by which a folder is locked
BESIDE = ("log.txt", OUTCOME)  # the files that `klamp ablate` keeps in a run's folder
FOR_VERL = "verl"  # the folder inside a run's folder that holds what klamp and verl tell each other
BEGUN = (*BESIDE, LOCK, f".{CONFIG}.part", FOR_VERL)
"""What may lie in the folder of a run that was killed before anything could be lost with it."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of one of these files, one a line; a line that is none, as a killed process leaves, is left out."""
    if not file.exists():
        return []
    rows = map(row_of, with_end(file).read_text(encoding="utf-8", errors="replace").splitlines())
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
    scores = {name.removeprefix(SCORE): value for name, value in row.items() if name.startswith(SCORE)}
    return {name: value for name, value in scores.items() if isinstance(value, int | float)}  # a line may be damaged


def row_of(line: str) -> dict[str, Any] | None:
    """The object in a line of one of these files; None where it holds none."""
    try:
        row = json_of(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in the folder of a run, oldest first: klamp's own (step-N) and verl's (global_step_N) are in
    `checkpoints`, TRL's (checkpoint-N) beside it."""
    inside = [*(folder / CHECKPOINTS).glob("*"), *folder.glob("checkpoint-*")]
    return sorted((each for each in inside if NAMED.fullmatch(each.name) and each.is_dir()), key=number_of)


def tidy(output_dir: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed run left half written."""
    for part in (output_dir / CHECKPOINTS).glob(f".{OWN}*"):
        shutil.rmtree(part, ignore_errors=True)
    for old in checkpoints(output_dir)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run of klamp's own loop, oldest first."""
    return [folder for folder in checkpoint_folders(output_dir) if folder.name.startswith(OWN)]


def newest_policy(folder: Path) -> Path | None:
    """The model (or adapter; verl's is in shards) in a run's newest checkpoint; None: there is none."""
    saved = checkpoint_folders(folder)
    return policy_in(saved[-1]) if saved else None


def policy_in(checkpoint: Path) -> Path:
    """Where a checkpoint of `checkpoint_folders` has its model (or adapter), whoever trained."""
    inside = {"step": POLICY, "global": "actor/huggingface"}
    return checkpoint / inside.get(re.split("[-_]", checkpoint.name)[0], "")


def policy_folder(name: str) -> str:
    """The folder of the weights where a checkpoint of klamp's is named; any other folder or hub id as it is."""
    given = at_home(name)
    inside = given / POLICY
    return str(inside) if inside.is_dir() and not (given / "config.json").exists() else name


def number_of(checkpoint: Path) -> int:
    """The number that a checkpoint's folder ends with: steps, or for TRL's updates."""
    return int(re.split("[-_]", checkpoint.name)[-1])


def run_folder(config: TrainConfig) -> Path:
    """The path of the folder that a run will write; nothing is created."""
    given = config.run.output_dir
    folder = Path(given) if given else free_folder(Path("runs"), short_name(config.task.task) or "run")
    check_folder(folder, resume=config.run.resume)
    above = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise unwritable(folder, f"{above} is {'not yours to write into' if above.is_dir() else 'a file'}")
    return folder


def make_folder(config: TrainConfig) -> tuple[Path, bool]:
    """Make the folder that a run will write, in one step that only one process can win; and whether it was new."""
    given = config.run.output_dir
    while not (given and Path(given).is_dir()):  # what it holds is looked at once nobody else can write there
        folder = run_folder(config)
        try:
            folder.mkdir(parents=True)
            return folder, True
        except FileExistsError:  # another process was faster
            continue
        except (OSError, ValueError) as error:  # a name with a NUL, which a YAML file can hold
            raise unwritable(folder, f"{type(error).__name__}: {error}") from error
    return Path(given), False


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
    there, inside = os.path.lexists(folder), folder.iterdir() if folder.is_dir() else ()
    full = not all(each.name in BEGUN or (each.name == CHECKPOINTS and not any(each.iterdir())) for each in inside)
    is_run, what, why, fix = (folder / CONFIG).exists(), "", "", ""
    if there and not folder.is_dir():
        what = f"the output folder is {'a file' if folder.exists() else 'a link that leads nowhere'}"
        why, fix = "a run writes several files into a folder", "choose another --output_dir"
    elif full and not resume:
        what = f"the output folder holds {'another run' if is_run else 'other files'}"
        why = "a run never writes over what is there"
        fix = "choose another --output_dir, delete the folder, or continue that run with --resume"
    elif resume and not is_run and (full or not there):
        what, why = "there is no run to continue in the output folder", f"it has no {CONFIG}"
        fix = "check --output_dir, or leave --resume out"
    if what:
        raise RunFolderError(what, got=str(folder), why=why, fix=fix)


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
    """A context in which no other process can take the folder; `by` is the command, as a person knows it."""
    from filelock import FileLock, Timeout  # part of the extra `train`; who only reads a run needs no lock

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise RunFolderError(
            "another process works in the output folder",
            got=str(folder),
            why=f"{by} would write the same files",
            fix="wait for it, stop it, or choose another --output_dir",
        ) from error
    except OSError as error:
        raise unwritable(folder, f"it cannot be locked: {type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be gone
            (folder / LOCK).unlink(missing_ok=True)  # while it is locked: whoever opened it meanwhile tries again
        with suppress(OSError):
            lock.release()
