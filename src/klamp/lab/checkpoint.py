"""Checkpoints: weights as safetensors, the optimizer as tensors (no code is run to load them), the rest as JSON.

    checkpoints/step-000050/policy/         save_pretrained: loads anywhere
    checkpoints/step-000050/optimizer.pt    loads with weights_only=True
    checkpoints/step-000050/reference.safetensors   only if the reference moves; so teacher.safetensors
    checkpoints/step-000050/state.json      step, controller, schedule, reference length, fingerprints
    checkpoints/step-000050/identity.json   the run's ID and configuration, SHA-256 of its model and data
    checkpoints/step-000050/checksums.json  SHA-256 of all other files

A checkpoint is written to a temporary folder and renamed once it is on the disk, after the lines of its steps: a killed
run leaves a whole checkpoint or none. Each file is read and compared with its checksum before a run goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from klamp.files import followed, json_of
from klamp.lab.folders import (
    CHECKPOINTS,
    NAMED,
    OWN,
    POLICY,
    SEAL,
    checkpoint_folders,
    checkpoints,
    lost,
    number_of,
    part_of,
    sync,
    tidy,
    write_whole,
)
from klamp.lab.tasks.base_model import make_readable, without_bars
from klamp.names import SUMMARY

STATE_FILE = "state.json"
"""The file of a checkpoint that holds what changes from step to step besides the weights."""
STATE = {"step", "controller", "schedule", "reference_length"}
"""The keys that it must hold for a run to continue."""
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
    documents: Mapping[str, Mapping[str, Any]],
    keep: int,
) -> Path:
    """Write the checkpoint of a step completely or not at all, and delete all but the newest `keep`.

    Of a policy with an adapter, only the adapter is written. `anchors`: weights of a reference or teacher that moves,
    by name. `documents`: name of a JSON file -> its content.
    """
    folder = output_dir / CHECKPOINTS / f"{OWN}{step:06d}"
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        with without_bars():
            policy.save_pretrained(str(part / POLICY))  # pyright: ignore[reportCallIssue]
        tokenizer.save_pretrained(str(part / POLICY))
        torch.save(optimizer.state_dict(), part / "optimizer.pt")
        for name, model in anchors.items():
            save_model(model, str(part / f"{name}.safetensors"))
        for name, content in documents.items():
            (part / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
        seal(part)
        for path in (*output_dir.glob("*.jsonl"), output_dir):
            sync(path)
    except UNWRITABLE as error:
        shutil.rmtree(part, ignore_errors=True)
        raise lost(output_dir, error) from error
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    sync(folder.parent)
    tidy(output_dir, keep=keep)
    return folder


def whole_newest(output_dir: Path) -> Path | None:
    """The newest checkpoint, each of its files read and compared; None if the run was killed before its first."""
    saved = checkpoints(output_dir)
    if not saved and (checkpoint_folders(output_dir) or (output_dir / SUMMARY).exists()):
        raise RunFolderError(
            "there is no checkpoint to continue from",
            got=str(output_dir / CHECKPOINTS),
            why="resume continues a run from its newest checkpoint, with the backend that wrote it",
            fix="check --output_dir and --backend, or start anew without --resume in another folder",
        )
    if saved:
        check(saved[-1])
    return saved[-1] if saved else None


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """A context in which an error of reading is that of a damaged checkpoint."""
    try:
        yield
    except UNREADABLE as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> RunFolderError:
    """The error for a checkpoint that cannot be read; names the newest whole one before it."""
    kind = checkpoint.name.rstrip("0123456789")
    number = number_of(checkpoint) if NAMED.fullmatch(checkpoint.name) else 0  # a copy may be called anything
    older = [each for each in checkpoint_folders(checkpoint.parent.parent) if each.name.startswith(kind)]
    whole = next((each for each in reversed(older) if number_of(each) < number and _is_whole(each)), None)
    return RunFolderError(
        "the checkpoint is damaged",
        got=str(checkpoint),
        why=f"{type(error).__name__}: {error}",
        fix="delete that folder; "
        + (f"{whole} is whole, and the run goes on from there then" if whole else "there is no whole one before it"),
    )


def _is_whole(checkpoint: Path) -> bool:
    try:
        check(checkpoint)
    except RunFolderError:
        return False
    return True


# checksums ------------------------------------------------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Write the SHA-256 of every file of a complete checkpoint into one file, once they are on the disk."""
    make_readable(folder)
    for path in (*folder.rglob("*"), folder):
        sync(path)
    write_whole(folder / SEAL, json.dumps(checksums(folder), indent=2))


def checksums(folder: Path, inside: Path | None = None) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint, or of a folder in it, but for hidden ones, as file managers leave."""
    sums: dict[str, str] = {}
    for file in sorted((inside or folder).rglob("[!.]*")):
        if file.is_file() and file.name != SEAL:
            with file.open("rb") as stream:
                sums[file.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return sums


def check(checkpoint: Path, inside: Path | None = None) -> None:
    """Refuse a checkpoint, of whichever backend, whose files are not those that were written.

    `inside`: the folder in it whose files alone are compared.
    """
    with reading(checkpoint):
        written = json_of((checkpoint / SEAL).read_text(encoding="utf-8"))
        present, within = checksums(checkpoint, inside), inside or checkpoint
        names = {name for name in written if (checkpoint / name).is_relative_to(within)} | present.keys()
        if changed := sorted(name for name in names if written.get(name) != present.get(name)):
            raise ValueError(f"{', '.join(changed)} changed on the disk since it was written")


def check_policy(folder: Path) -> None:
    """Refuse the weights of a model or adapter in a checkpoint that are not those that were written."""
    inside = followed(folder)
    for checkpoint in (inside, inside.parent):
        if (checkpoint / SEAL).exists() or (checkpoint / STATE_FILE).exists():
            check(checkpoint, inside)


# reading --------------------------------------------------------------------------------------------------------------


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint."""
    with reading(checkpoint):
        state = json_of((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        if missing := sorted(STATE - state.keys()):
            raise ValueError(f"{STATE_FILE} lacks {', '.join(missing)}")
        if repr(state["step"]) != repr(number_of(checkpoint)):
            raise ValueError(f"step in {STATE_FILE} is {reprlib.repr(state['step'])}")
        return state


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Load the saved moments into the optimizer; only tensors and numbers are read, no code is run."""
    with reading(checkpoint):
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved)


def load_anchors(checkpoint: Path, anchors: Mapping[str, nn.Module]) -> None:
    """Load the weights of a reference or a teacher that moves, by name."""
    with reading(checkpoint):
        for name, model in anchors.items():
            load_model(model, str(checkpoint / f"{name}.safetensors"))
