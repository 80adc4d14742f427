"""The points of a run at which a process can be made to kill itself, each by its name in words.

A point wraps the very functions that a run calls. What is "half written" there is what a file holds that was being
written: its first half. The process then sends SIGKILL to its group: nothing is flushed, closed or caught.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import peft.peft_model
import torch
import transformers.modeling_utils
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from klamp.lab import checkpoint, evaluation, folders, loop, sampling
from klamp.lab.anchors import MovingReference
from klamp.scoring.scorer import Scorer


def die() -> None:
    """End this process and all of its group, as `kill -9` does."""
    os.killpg(0, signal.SIGKILL)


class Aim:
    """Counts how often a run comes by a point; says yes once, at the time that is asked for (0: never)."""

    def __init__(self, at: int) -> None:
        self.at, self.passed = at, 0

    def __call__(self) -> bool:
        self.passed += 1
        return self.passed == self.at


Point = Callable[[Aim], None]
"""Wraps what a run calls; never put back, because the process is a run's own."""


def die_half_way(stream: Any, aim: Aim) -> None:
    """Make the process die half way through a write to this file."""
    usual = stream.write

    def write(text: str) -> int:
        if aim():
            usual(text[: len(text) // 2])
            stream.flush()
            die()
        return usual(text)

    stream.write = write


def half_of(name: str) -> Point:
    """While a file of this name is written."""

    def wrap(aim: Aim) -> None:
        usual = Path.open

        def opened(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            stream = usual(self, mode, *args, **options)
            if self.name == name and mode in ("a", "w"):
                die_half_way(stream, aim)
            return stream

        Path.open = opened

    return wrap


def before(owner: Any, name: str, *, last: str = "") -> Point:
    """Before a call of `owner.name` (whose first argument is a path that ends so)."""

    def wrap(aim: Aim) -> None:
        usual = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if str(args[-1] if last else "").endswith(last) and aim():
                die()
            return usual(*args, **options)

        setattr(owner, name, call)

    return wrap


def after(owner: Any, name: str, *, ruin: Callable[..., object] | None = None) -> Point:
    """After a call of `owner.name`, and after `ruin` had what it was called with."""

    def wrap(aim: Aim) -> None:
        usual = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            output = usual(*args, **options)
            if aim():
                if ruin is not None:
                    ruin(*args)
                die()
            return output

        setattr(owner, name, call)

    return wrap


def halved(owner: Any, name: str) -> Point:
    """While `owner.name` writes the file that is its second argument."""
    return after(owner, name, ruin=lambda _what, file, *_: os.truncate(file, Path(file).stat().st_size // 2))


def weights(aim: Aim) -> None:
    for owner in (transformers.modeling_utils, peft.peft_model):
        halved(owner, "safe_save_file")(aim)


def deleted(aim: Aim) -> None:
    """While an old checkpoint is deleted: its optimizer is gone, the rest is there."""
    usual = shutil.rmtree

    def call(path: Any, *args: Any, **options: Any) -> None:
        moments = Path(path) / "optimizer.pt"
        if moments.exists() and aim():
            moments.unlink()
            die()
        usual(path, *args, **options)

    shutil.rmtree = call


def tracked(aim: Aim) -> None:
    usual = RecordWriter.write

    def write(self: Any, data: bytes) -> None:
        if aim():
            stream, self._writer = self._writer, (pieces := BytesIO())
            usual(self, data)
            stream.write(pieces.getvalue()[: len(pieces.getvalue()) // 2])
            stream.flush()
            die()
        usual(self, data)

    RecordWriter.write = write


POINTS: dict[str, Point] = {
    "while the configuration is written": half_of(".config.yaml.part"),
    "before the configuration is in its place": before(Path, "replace", last="config.yaml"),
    "while a metrics line is written": half_of("metrics.jsonl"),
    "between a metrics line and TensorBoard": before(SummaryWriter, "add_scalar"),
    "while TensorBoard's file is written": tracked,
    "while completions are written": half_of("completions.jsonl"),
    "while answers are written": half_of("answers.jsonl"),
    "while an alarm is written": half_of("alarms.jsonl"),
    "in generation": before(sampling, "draw"),
    "in scoring": before(Scorer, "forward"),
    "after the rollout": after(loop, "collect"),
    "before an optimizer step": before(torch.optim.AdamW, "step"),
    "after an optimizer step": after(torch.optim.AdamW, "step"),
    "after the reference moved": after(MovingReference, "after_step"),
    "in evaluation": after(evaluation, "completed"),
    "while the weights are saved": weights,
    "while the moments are saved": halved(torch, "save"),
    "while the reference is saved": halved(checkpoint, "save_model"),
    "while the state is saved": half_of("state.json"),
    "before a file is on the disk": before(folders.os, "fsync"),
    "before a checkpoint is in its place": before(Path, "rename"),
    "after a checkpoint is in its place": after(Path, "rename"),
    "while an old checkpoint is deleted": deleted,
    "while the summary is written": half_of(".summary.json.part"),
    "before the summary is in its place": before(Path, "replace", last="summary.json"),
    "while a resume cuts the metrics": half_of(".metrics.jsonl.part"),
    "before a resume has cut the metrics": before(Path, "replace", last="metrics.jsonl"),
}
"""Every point; a run that lacks what it is about (a moving reference, say) never comes by."""
