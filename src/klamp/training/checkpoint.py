"""Checkpoints: weights as safetensors, the optimizer as tensors (no code is run to load them), the rest as JSON.

    checkpoints/step-000050/policy/         save_pretrained: loads anywhere
    checkpoints/step-000050/optimizer.pt    loads with weights_only=True
    checkpoints/step-000050/reference.safetensors   only where the reference moves
    checkpoints/step-000050/state.json      step, controller, schedule, reference length

A checkpoint is written beside its place and then moved there: a killed run leaves a whole one or none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
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
from klamp.tasks.cache import without_bars
from klamp.training.folders import CHECKPOINTS
from klamp.training.sharding import Whole, split_like

REFERENCE = "reference.safetensors"
STATE = {"step", "controller", "schedule", "reference_length", "before", "metrics"}
"""The keys that state.json must hold for a run to continue."""


def save(
    output_dir: Path,
    step: int,
    *,
    policy: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    reference: nn.Module | None,
    state: dict[str, Any],
    keep: int,
    whole: Whole | None = None,
) -> Path:
    """Write the checkpoint of a step, and delete all but the newest `keep`.

    Args:
        output_dir: folder of the run.
        step: steps done.
        policy: the unwrapped policy; with an adapter, only the adapter is written.
        tokenizer: saved with the weights.
        optimizer: its moments.
        reference: weights of a reference that moves.
        state: plain numbers and names.
        keep: how many checkpoints to leave.
        whole: weights and moments, where the policy's are split over processes.
    """
    weights = {} if whole is None else {"state_dict": whole.weights}
    moments = optimizer.state_dict() if whole is None else whole.optimizer

    def fill(part: Path) -> None:
        with without_bars():
            policy.save_pretrained(str(part / "policy"), **weights)  # pyright: ignore[reportCallIssue]
        tokenizer.save_pretrained(str(part / "policy"))
        torch.save(moments, part / "optimizer.pt")
        if reference is not None:
            save_model(reference, str(part / REFERENCE))

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
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    fill(part)
    (part / "state.json").write_text(json.dumps(state | {"step": step}, indent=2), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    for old in checkpoints(output_dir)[:-keep]:
        shutil.rmtree(old)
    return folder


def checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted((output_dir / CHECKPOINTS).glob("step-*"))


def newest(output_dir: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        RunFolderError: there is none.
    """
    return last_of(checkpoints(output_dir), output_dir)


def last_of(found: Sequence[Path], output_dir: Path) -> Path:
    """The last of the checkpoints that were found in a run's folder.

    Raises:
        RunFolderError: none was.
    """
    if not found:
        raise RunFolderError(
            "there is no checkpoint to continue from",
            got=str(output_dir / CHECKPOINTS),
            why="resume continues a run from its newest checkpoint, with the backend that wrote it",
            fix="check --output_dir and --backend, or start anew without --resume in another folder",
        )
    return found[-1]


def load_state(checkpoint: Path) -> dict[str, Any]:
    """Read the JSON state of a checkpoint.

    Raises:
        RunFolderError: it is missing or damaged.
    """
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        missing = sorted(STATE - state.keys())
        if missing:
            raise ValueError(f"state.json lacks {', '.join(missing)}")
    except (OSError, ValueError, AttributeError) as error:
        raise damaged(checkpoint, error) from error
    return state


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Load the saved moments into the optimizer; only tensors and numbers are read, no code is run.

    Raises:
        RunFolderError: they are missing, damaged, or those of other weights.
    """
    try:
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(split_like(saved, optimizer))
    except (OSError, ValueError, LookupError, RuntimeError, EOFError, UnpicklingError) as error:
        raise damaged(checkpoint, error) from error


def damaged(checkpoint: Path, error: Exception) -> RunFolderError:
    """The error for a checkpoint that cannot be read."""
    return RunFolderError(
        "the checkpoint is damaged",
        got=str(checkpoint),
        why=f"{type(error).__name__}: {error}",
        fix="delete that folder; the checkpoint before it is used then",
    )


def load_reference(checkpoint: Path, reference: nn.Module | None) -> None:
    """Load the weights of a moving reference; nothing is done for one that never moves.

    Raises:
        RunFolderError: it is missing or damaged.
    """
    if reference is None:
        return
    try:
        load_model(reference, str(checkpoint / REFERENCE))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise damaged(checkpoint, error) from error
