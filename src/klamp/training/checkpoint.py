"""Checkpoints: weights as safetensors, the optimizer as tensors (no code is run to load them), the rest as JSON.

    checkpoints/step-000050/policy/         save_pretrained: loads anywhere
    checkpoints/step-000050/optimizer.pt    loads with weights_only=True
    checkpoints/step-000050/reference.safetensors   only where the reference moves; so teacher.safetensors
    checkpoints/step-000050/state.json      step, controller, schedule, reference length
    checkpoints/step-000050/checksums.json  SHA-256 of all of them; a complete checkpoint of TRL or verl gets one too

A checkpoint is written beside its place and moved there once it is on the disk: a killed run, or a machine that loses
power, leaves a whole one or none; the lines that speak of its steps are on the disk before it. What changes later on
the disk is noticed before a run goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from klamp.errors import RunFolderError
from klamp.tasks.cache import make_readable, without_bars
from klamp.tasks.files import json_of
from klamp.tasks.paths import followed
from klamp.training.folders import (
    CHECKPOINTS,
    CONFIG,
    NAMED,
    POLICY,
    SEAL,
    SUMMARY,
    checkpoint_folders,
    lost,
    number_of,
    part_of,
    sync,
    write_whole,
)

OWN, OF_TRL, OF_VERL = "step-", "checkpoint-", "global_step_"
"""How the names of a backend's checkpoints begin."""
STATE = {"step", "controller", "schedule", "reference_length"}
"""The keys that state.json must hold for a run to continue."""
UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, EOFError),
    *(UnpicklingError, SafetensorError),
)
"""What reading a damaged file can raise."""
UNWRITABLE = (OSError, RuntimeError, SafetensorError)
"""What writing a checkpoint onto a full disk can raise: torch and safetensors have errors of their own."""


def save(
    output_dir: Path,
    step: int,
    *,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    anchors: Mapping[str, nn.Module],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of a step, and delete all but the newest `keep`.

    Args:
        output_dir: folder of the run.
        step: steps done.
        policy: the unwrapped policy; with an adapter, only the adapter is written.
        tokenizer: saved with the weights.
        optimizer: its moments.
        anchors: weights of a reference or teacher that moves, by name.
        state: plain numbers and names.
        keep: how many checkpoints to leave.
    """

    def fill(part: Path) -> None:
        with without_bars():
            policy.save_pretrained(str(part / POLICY))  # pyright: ignore[reportCallIssue]
        tokenizer.save_pretrained(str(part / POLICY))
        torch.save(optimizer.state_dict(), part / "optimizer.pt")
        for name, model in anchors.items():
            save_model(model, str(part / f"{name}.safetensors"))

    return write(output_dir, step, fill, state=state, keep=keep)


def write(output_dir: Path, step: int, fill: Callable[[Path], None], *, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint completely or not at all, and delete all but the newest `keep`.

    Args:
        output_dir: folder of the run.
        step: steps done.
        fill: writes what belongs to it besides the state into the folder that it is given.
        state: plain numbers and names.
        keep: how many checkpoints to leave.
    """
    folder = output_dir / CHECKPOINTS / f"step-{step:06d}"
    part, aside = part_of(folder), _aside(folder)
    for left in (part, aside):
        shutil.rmtree(left, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        fill(part)
        (part / "state.json").write_text(json.dumps(state | {"step": step}, indent=2), encoding="utf-8")
        seal(part)
        for path in (*output_dir.glob("*.jsonl"), output_dir):
            sync(path)
    except UNWRITABLE as error:
        shutil.rmtree(part, ignore_errors=True)
        raise lost(output_dir, error) from error
    if folder.exists():  # of a course that the run went back before
        folder.rename(aside)
    part.rename(folder)
    sync(folder.parent)
    tidy(output_dir, keep=keep)
    return folder


def tidy(output_dir: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what a killed run left of others.

    One that goes is moved aside first: what is left of it, when a run is killed meanwhile, is no checkpoint any more.
    Where none is in its place nothing is deleted.
    """
    found = checkpoints(output_dir)
    for left in (output_dir / CHECKPOINTS).glob(".step-*") if found else ():
        shutil.rmtree(left, ignore_errors=True)
    for old in found[:-keep]:
        shutil.rmtree(old.rename(_aside(old)), ignore_errors=True)


def _aside(folder: Path) -> Path:
    """Where a checkpoint is on its way out."""
    return folder.with_name(f".{folder.name}.old")


def checkpoints(output_dir: Path, *, begin: str = OWN) -> list[Path]:
    """The complete checkpoints of a run, oldest first.

    Args:
        output_dir: folder of the run.
        begin: how the names of a backend's checkpoints begin; those that are not klamp's own are complete once sealed.
    """
    found = [each for each in checkpoint_folders(output_dir) if each.name.startswith(begin)]
    return [each for each in found if begin == OWN or (each / SEAL).exists()]


def newest(output_dir: Path, *, begin: str = OWN) -> Path | None:
    """The newest checkpoint of a run; None where it was killed before its first.

    Args:
        output_dir: folder of the run.
        begin: as in `checkpoints`.

    Raises:
        RunFolderError: the folder is one of a run that had some.
    """
    return last_of(checkpoints(output_dir, begin=begin), output_dir, begin=begin)


def last_of(found: Sequence[Path], output_dir: Path, *, begin: str) -> Path | None:
    """The last of the checkpoints that were found in a run's folder; None where the run was killed before its first.

    Args:
        found: the whole ones of the backend that is to go on, oldest first.
        output_dir: folder of the run.
        begin: how the names of that backend's checkpoints begin.

    Raises:
        RunFolderError: another backend wrote some, or the run was done.
    """
    others = [each for each in checkpoint_folders(output_dir) if not each.name.startswith(begin)]
    if not found and (others or (output_dir / SUMMARY).exists()):
        raise RunFolderError(
            "there is no checkpoint to continue from",
            got=str(output_dir / CHECKPOINTS),
            why="resume continues a run from its newest checkpoint, with the backend that wrote it",
            fix="check --output_dir and --backend, or start anew without --resume in another folder",
        )
    return found[-1] if found else None


def whole_newest(output_dir: Path, *, begin: str = OWN) -> Path | None:
    """The newest checkpoint, read once to its last byte; None where the run was killed before its first.

    Raises:
        RunFolderError: it is damaged; names the newest one that is whole.
    """
    folder = newest(output_dir, begin=begin)
    if folder is not None:
        check(folder)
    return folder


def check(checkpoint: Path, *, besides: str = "", inside: Path | None = None) -> None:
    """Refuse a checkpoint, whose ever, whose files are not those that were written.

    Args:
        checkpoint: its folder.
        besides: what is to be done besides deleting it.
        inside: the folder in it whose files are looked at; None: all are.

    Raises:
        RunFolderError: it is damaged; names the newest one that is whole.
    """
    try:
        names = changed(checkpoint, inside=inside)
    except UNREADABLE as error:
        raise damaged(checkpoint, error, besides=besides) from error
    if names:
        error = ValueError(f"{', '.join(names)} changed on the disk since it was written")
        raise damaged(checkpoint, error, besides=besides)


def check_policy(folder: Path) -> None:
    """Refuse weights in a checkpoint, whose ever, that are not those that were written; other folders are let be.

    Args:
        folder: of the model or adapter.

    Raises:
        RunFolderError: they are damaged; names the newest checkpoint that is whole.
    """
    inside = followed(folder)
    for checkpoint in (inside, *inside.parents[:2]):  # verl keeps its models two folders deep
        if _is_noted(checkpoint):
            check(checkpoint, inside=inside)


def _is_noted(checkpoint: Path) -> bool:
    """Whether a checkpoint should have checksums: one of klamp's own in its run, or any that was complete once."""
    own = NAMED.fullmatch(checkpoint.name) and checkpoint.name.startswith(OWN)
    return (checkpoint / SEAL).exists() or bool(own and (checkpoint.parents[1] / CONFIG).is_file())


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint.

    Raises:
        RunFolderError: it is missing or damaged, or of another step.
    """
    try:
        state = json_of((checkpoint / "state.json").read_text(encoding="utf-8"))
        if missing := sorted(STATE - state.keys()):
            raise ValueError(f"state.json lacks {', '.join(missing)}")
        if repr(state["step"]) != repr(number_of(checkpoint)):
            raise ValueError(f"step in state.json is {reprlib.repr(state['step'])}")
    except UNREADABLE as error:
        raise damaged(checkpoint, error) from error
    return state


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Load the saved moments into the optimizer; only tensors and numbers are read, no code is run.

    Raises:
        RunFolderError: they are missing, damaged, or those of other weights.
    """
    try:
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved)
    except UNREADABLE as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception, *, besides: str = "") -> RunFolderError:
    """The error for a checkpoint that cannot be read; names the newest whole one before it.

    Args:
        checkpoint: its folder.
        error: what reading it raised.
        besides: what is to be done besides deleting it.
    """
    kind = checkpoint.name.rstrip("0123456789")
    number = number_of(checkpoint) if NAMED.fullmatch(checkpoint.name) else 0  # a copy may be called anything
    older = [each for each in checkpoint_folders(checkpoint.parent.parent) if each.name.startswith(kind)]
    whole = next((each for each in reversed(older) if number_of(each) < number and is_whole(each)), None)
    return RunFolderError(
        "the checkpoint is damaged",
        got=str(checkpoint),
        why=f"{type(error).__name__}: {error}",
        fix=f"delete that folder{besides}; "
        + (f"{whole} is whole, and the run goes on from there then" if whole else "there is no whole one before it"),
    )


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint's files are those that were written."""
    try:
        return not changed(checkpoint)
    except UNREADABLE:
        return False


def load_anchors(checkpoint: Path, anchors: Mapping[str, nn.Module]) -> None:
    """Load the weights of a reference or a teacher that moves, by name.

    Raises:
        RunFolderError: they are missing or damaged.
    """
    try:
        for name, model in anchors.items():
            load_model(model, str(checkpoint / f"{name}.safetensors"))
    except UNREADABLE as error:
        raise damaged(checkpoint, error) from error


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def seal(folder: Path) -> None:
    """Note the SHA-256 of every file of a checkpoint that is complete, once it is on the disk."""
    make_readable(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)
    for path in (*folder.rglob("*"), folder):
        sync(path)
    sums = {file.relative_to(folder).as_posix(): _checksum(file) for file in files}
    write_whole(folder / SEAL, json.dumps(sums, indent=2))


def changed(folder: Path, *, inside: Path | None = None) -> list[str]:
    """The files of a checkpoint that are not those that were sealed, and those that came later but hidden ones.

    Args:
        folder: of the checkpoint.
        inside: the folder in it whose files are looked at; None: all are.

    Raises:
        OSError, ValueError, TypeError, AttributeError: there is no seal, or it cannot be read.
    """
    sums = {folder / name: noted for name, noted in json_of((folder / SEAL).read_text(encoding="utf-8")).items()}
    files = {file: noted for file, noted in sums.items() if file.is_relative_to(inside or folder)}
    other = [file for file, noted in files.items() if not file.is_file() or _checksum(file) != noted]
    here = [file for file in (inside or folder).rglob("[!.]*") if file.is_file() and file.name != SEAL]
    late = {file: " (it has no checksum)" for file in sorted(here) if file not in sums}
    return [file.relative_to(folder).as_posix() + late.get(file, "") for file in (*other, *late)]
