"""Reads what trainers and trackers log of each step: JSONL of metrics (verl's file logger and many others), the
trainer_state.json of TRL or any transformers Trainer, TensorBoard's event files, and offline runs of W&B.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from klamp.diagnostics.history import History, Row
from klamp.diagnostics.names import (
    OURS,
    as_number,
    evaluations,
    flat,
    is_verl_line,
    known,
    number_names,
    settings_of,
    step_of,
    translate,
)
from klamp.errors import missing_library
from klamp.records.files import check_logged, each_row, json_lines, object_in, shortened, unreadable
from klamp.tasks.paths import followed, with_end

Names = Mapping[str, str]
"""klamp's name of a metric -> that in the record, before the names that klamp knows."""
Logged = Sequence[tuple[int, Mapping[str, Any]]]
"""Step -> what was logged of it."""
BY_NEMO = "train/token_mult_prob_error"
"""A metric that only NeMo-RL logs, whose train/kl_penalty is the k3 itself."""


def _history(
    source: str,
    rows: Logged,
    config: Mapping[str, Any],
    names: Names | None,
    path: Path,
    *,
    ours: bool = True,
) -> History:
    """The history of a run as it was logged, row by row.

    Args:
        source: who wrote the record, in words.
        rows: step -> what was logged of it.
        config: the arguments of the run, as far as they were logged.
        names: see `Names`.
        path: where the record is, for messages.
        ours: whether klamp may have written it; every name of an evaluation is a score there.
    """
    logged = {name for _, row in rows for name in row}
    rows, names = _kl_as_it_is(rows, names or {}, logged)
    check_logged(names, number_names(row for _, row in rows if not _sums_up(row)), path)
    history = History(source=source, settings=settings_of(config, logged, names), config=config)
    seen: set[int] = set()
    for step, row in rows:
        scores, metrics = evaluations(row, every=ours and OURS in logged), translate(row, names)
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if metrics and not _sums_up(row):
            if step in seen and step < history.rows[-1].step:  # the run went back: what it does again counts
                history.rows = [each for each in history.rows if each.step < step]
            if history.rows and step == history.rows[-1].step:  # one of several rows of the step may lack a value
                numbers = {name: value for name, value in metrics.items() if not math.isnan(value)}
                metrics = {**history.rows.pop().metrics, **numbers}
            seen.add(step)
            history.rows.append(Row(step=step, metrics=metrics))
    return history


def _kl_as_it_is(rows: Logged, names: Names, logged: set[str]) -> tuple[Logged, Names]:
    """The rows without a KL that nobody measured, and the names of the metrics: what is below 0 is no k3 but a k1."""
    if BY_NEMO in logged:
        names = {"kl/k3": "train/kl_penalty", **names}
    numbers = {name: [x for _, row in rows if (x := as_number(row.get(name))) is not None] for name in logged}
    trained = any(math.isfinite(x) for name in logged if known(name) == "train/loss" for x in numbers[name])
    for theirs in [names["kl/k3"]] if "kl/k3" in names else [name for name in logged if known(name) == "kl/k3"]:
        values = numbers.get(theirs, [])
        if any(round(x, 6) < 0 for x in values):
            names = {"kl/k1": theirs, **{ours: name for ours, name in names.items() if ours != "kl/k3"}}
        if trained and all(map(math.isnan, values)):
            rows = [(step, {name: value for name, value in row.items() if name != theirs}) for step, row in rows]
    return rows, names


def _sums_up(row: Mapping[str, object]) -> bool:
    """Whether a row is the last one, which sums up the run."""
    return "train_runtime" in row


# --- JSONL ----------------------------------------------------------------------------------------------------


def read_metrics(path: Path, names: Names | None = None) -> History:
    """Read the history in a JSONL file with the metrics of one step per line.

    Raises:
        DataError: no line has a metric that klamp knows.
        UnknownNameError: no row has one of `names`.
    """
    lines = list(json_lines(path))
    verls = bool(lines) and is_verl_line(lines[0])
    rows = list(map(flat, lines))
    first = next(filter(None, rows), {})
    numbered = [(number if (step := step_of(row)) is None else step, row) for number, row in enumerate(rows, start=1)]
    nothing = "it holds no whole line" if path.stat().st_size else "the file is empty"
    history = _history("verl file log" if verls else "JSONL metrics", numbered, {}, names, path)
    if not (history.rows or (verls and history.evaluations)):
        raise unreadable(
            "no metric and no token log-probabilities were found",
            path,
            why=f"the first line has {', '.join(list(first)[:12])}" if first else nothing,
            fix="metrics: a line per step with names as TRL, verl or klamp write them (kl, reward, ...), or --map with "
            "your own; completions: old_log_probs and ref_log_prob (or policy_logprobs and ref_logprobs), one number "
            "per token",
        )
    return history


# --- trainer_state.json ---------------------------------------------------------------------------------------

STATE = "trainer_state.json"


def find_state(path: Path) -> Path | None:
    """Find the trainer_state.json of a folder or of its newest checkpoint."""
    if (path / STATE).is_file():
        return path / STATE
    found = sorted(path.glob(f"checkpoint-*/{STATE}"), key=lambda file: _number(file.parent.name))
    return found[-1] if found else None


def _number(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1


def read_trl_state(path: Path, names: Names | None = None) -> History:
    """Read the history in a trainer_state.json.

    Raises:
        DataError: it is none.
        UnknownNameError: no row has one of `names`.
    """
    logs = object_in(path).get("log_history")
    if not isinstance(logs, list):
        raise unreadable("a trainer state has no log_history", path, why="without logged rows there is no history")
    read, what = lambda row: (int(row.get("step", 0)), row), "row {} of log_history is damaged"
    numbered = list(each_row(logs, path, read, what=what))
    return _history("TRL trainer state", numbered, {}, names, path, ours=False)


# --- TensorBoard ----------------------------------------------------------------------------------------------

EVENTS = "events.out.tfevents*"


def event_folders(path: Path) -> list[Path]:
    """All folders below a path that hold event files."""
    return sorted({with_end(file).parent for file in path.rglob(EVENTS)})


def read_tensorboard(path: Path, names: Names | None = None) -> History:
    """Read the history in a folder of event files, or in a single one, with tensorboard's own reader.

    Raises:
        DataError: several runs below the folder, or no scalars in it.
        UnknownNameError: no row has one of `names`.
        MissingLibrary: tensorboard is not installed.
    """
    folders = [path] if path.is_file() else event_folders(path)
    found = [(*each, folder) for folder in folders if (each := _read_events(folder))[0]]  # others hold arguments alone
    found.sort(key=lambda each: min(each[0]))
    if any(max(before) >= min(after) for (before, *_), (after, *_) in pairwise(found)):
        raise unreadable(
            "several TensorBoard runs lie below one folder",
            path,
            why=", ".join(str(folder.relative_to(path)) for *_, folder in found),
            fix="name one of them; of one run that was resumed, put all event files into one folder",
        )
    scalars = {step: row for rows, *_ in found for step, row in rows.items()}
    config = {name: value for _, each, _ in found for name, value in each.items()}
    if not scalars:
        raise unreadable("there are no scalars in the event files", path, why="nothing was logged as a scalar")
    rows = [(step, scalars[step]) for step in sorted(scalars)]
    return _history("TensorBoard", rows, config, names, path)


def _read_events(path: Path) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
    """Read the metrics (step -> name -> value), and the arguments if transformers wrote them as text."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise missing_library("tensorboard", by=f"the record {path}") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            rows.setdefault(event.step, {})[name] = float(event.value)
    config: dict[str, Any] = {}
    for name in events.Tags()["tensors"]:
        if name.startswith("args"):
            text = b"".join(events.Tensors(name)[-1].tensor_proto.string_val).decode("utf-8", "replace")
            found = _value(text)
            config |= found if isinstance(found, dict) else {}
    return rows, config


def _value(text: str) -> Any:
    """What a text of JSON says; the text itself, where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# --- W&B: records in wandb's own protocol, in files with LevelDB's framing ------------------------------------

MAGIC, BLOCK = b":W&B", 32768
FILE_HEADER, FRAME = 7, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def find_offline_run(path: Path) -> list[Path]:
    """Find the run file in a W&B folder: in the run's own folder, or in `wandb/offline-run-...`."""
    found = {followed(file) for pattern in ("*.wandb", "*/*.wandb", "wandb/*/*.wandb") for file in path.glob(pattern)}
    return sorted(found)


def read_wandb(path: Path, names: Names | None = None) -> History:
    """Read the history in the file of an offline run; the messages are read with wandb.

    Raises:
        DataError: it is none, or nothing was logged.
        UnknownNameError: no row has one of `names`.
        MissingLibrary: wandb is not installed.
    """
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise missing_library("wandb", by=f"the record {path}") from error
    config: dict[str, Any] = {}
    rows: list[tuple[int, dict[str, Any]]] = []
    logged = 0
    for data in frames(path):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            record.ParseFromString(data)
        except Exception as error:  # protobuf has an error type per implementation
            raise unreadable("a W&B run is damaged", path, why=shortened(error)) from error
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            update = record.run.config.update if kind == "run" else record.config.update
            config |= {item.key: _value(item.value_json) for item in update if item.key}
        elif kind == "history":
            logged += 1
            row = {"/".join(item.nested_key) or item.key: _value(item.value_json) for item in record.history.item}
            rows.append((logged if (step := step_of(row)) is None else step, row))
    if not rows:
        raise unreadable("nothing was logged in the W&B run", path, why="it has no history")
    return _history("W&B offline run", rows, config, names, path)


def frames(path: Path) -> Iterator[bytes]:
    """The records of a file, put together from its blocks; a half-written one, left by a killed run, is ignored.

    Current versions of wandb have no reader for the frame in Python.
    """
    data = with_end(path).read_bytes()
    if not data.startswith(MAGIC):
        raise unreadable("a file is no W&B run", path, why=f"it does not begin with {MAGIC.decode()}")
    position, parts = FILE_HEADER, bytearray()
    while position + FRAME.size <= len(data):
        left = BLOCK - position % BLOCK
        _, length, kind = FRAME.unpack_from(data, position)
        if left < FRAME.size or not kind:  # the rest of a block, filled with zeros
            position += left
            continue
        position += FRAME.size
        if position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield bytes(parts)
            parts.clear()
