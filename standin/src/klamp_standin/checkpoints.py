"""The checkpoints of the stand-in server: weights and optimizers in memory and, with a folder, on disk."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from klamp_standin.model import LoraShape, Trained, Weights
from klamp_standin.protocol import Refused


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saved weights, with the state of their optimizer."""

    weights: Weights
    optimizer: dict[str, Any]

    def restored(self, *, with_optimizer: bool) -> Trained:
        """A training run that continues from this checkpoint."""
        run = Trained(weights=self.weights.frozen())
        if with_optimizer:
            run.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        return run


class Checkpoints:
    """All checkpoints by their tinker:// path; with a folder they are still there after the server has ended."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.held: dict[str, Checkpoint] = {}

    def save(self, path: str, run: Trained, *, overwrite: bool) -> None:
        """Save a training run under a path.

        Raises:
            Refused: the path is taken, or is no path.
        """
        if not overwrite and self._find(path) is not None:
            raise Refused(f"{path} exists already; pass overwrite", status=409)
        saved = Checkpoint(weights=run.weights.frozen(), optimizer=copy.deepcopy(run.optimizer.state_dict()))
        self.held[path] = saved
        if (file := self._file(path)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            content = {"shape": asdict(saved.weights.shape), "tensors": saved.weights.tensors}
            torch.save(content | {"optimizer": saved.optimizer}, part)
            part.rename(file)

    def load(self, path: str) -> Checkpoint:
        """Load the checkpoint of a path.

        Raises:
            Refused: there is none.
        """
        found = self._find(path)
        if found is None:
            raise Refused(f"there is no checkpoint {path!r}", status=404)
        return found

    def _find(self, path: str) -> Checkpoint | None:
        file = self._file(path)
        if path not in self.held and file is not None and file.exists():
            content = torch.load(file, weights_only=True)
            weights = Weights(shape=LoraShape(**content["shape"]), tensors=content["tensors"])
            self.held[path] = Checkpoint(weights=weights, optimizer=content["optimizer"])
        return self.held.get(path)

    def _file(self, path: str) -> Path | None:
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or any(part in ("", ".", "..") for part in parts):
            raise Refused(f"{path!r} is no checkpoint; it reads tinker://RUN/weights/NAME, and NAME has no slash")
        return None if self.folder is None else self.folder.joinpath(*parts).with_suffix(".pt")
