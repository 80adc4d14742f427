"""Reads logs of metrics: JSONL, printed texts, trainer_state.json, TensorBoard's event files, offline runs of W&B."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from klamp.doctor.history import History, Row
from klamp.doctor.metrics import (
    OURS,
    STEP_NAMES,
    SWITCHES,
    as_number,
    declare_no_reference,
    evaluations,
    flat,
    is_verl_line,
    names_in,
    own_name,
    settings_of,
    step_of,
    translate,
    unread_kls,
)
from klamp.doctor.readers.files import TOKEN_LISTS, each_row, json_lines, object_in, shortened, text_lines, unreadable
from klamp.errors import missing_library, unknown_name
from klamp.files import followed, with_end
from klamp.names import REPORT, TRAINER_STATE

Config = Mapping[str, Any]
Names = Mapping[str, str]
"""klamp's name of a metric -> its name in the record, before the names that klamp reads."""
Logged = Sequence[tuple[int, Mapping[str, Any]]]
"""Step -> its logged values."""
SUMMARY = "train_runtime"
"""A name that only the last row has, which sums up a run."""
CLOCKS = ("_timestamp", "_runtime", "Wall time")
"""W&B's and TensorBoard's names of the time of a row."""
ALIVE = ("train/loss", "train/policy_loss", "train/grad_norm")
"""Where one of them is a number, training went on: what is NaN in every row was not measured."""


def _history(
    source: str, rows: Logged, names: Names | None, path: Path, *, config: Config | None = None, ours: bool = True
) -> History:
    """The history of logged rows; `ours`: klamp may have written them, and all names of an evaluation are scores."""
    logged = {name for _, row in rows for name in row}
    theirs, unmeasured = names_in(logged), _unmeasured(rows, logged)
    rows = [(step, {name: value for name, value in row.items() if name not in unmeasured}) for step, row in rows]
    names = _kl_as_it_is(rows, names or {}, logged, theirs)
    step_rows = [row for _, row in rows if SUMMARY not in row]
    numbers = {name for row in step_rows for name in row if as_number(row[name]) is not None}
    numbers = (numbers - {*CLOCKS}) | unmeasured
    for name in names.values():
        if name not in numbers:
            present = ", ".join(sorted(numbers)[:12]) or "no number"
            raise unknown_name(f"number in the rows of {path}", name, numbers, why=f"it has {present}")
    history = History(source=source, settings=settings_of(config or {}, logged, names), config=config or {})
    read_columns = {*names.values(), *(name for name in logged if (n := own_name(name, theirs)) and n not in names)}
    history.unread = unread_kls({name for _, row in rows for name in row}, read_columns)
    history.cautions += _no_numbers(rows, theirs, unmeasured)
    steps: set[int] = set()
    for step, row in rows:
        scores, metrics = evaluations(row, every=ours and OURS in logged), translate(row, names, theirs)
        if scores:
            history.evaluations.append(Row(step=step, metrics=scores))
        if metrics and SUMMARY not in row:
            if step in steps and step < history.rows[-1].step:  # the run went back: what it does again counts
                history.rows = [earlier for earlier in history.rows if earlier.step < step]
            if history.rows and step == history.rows[-1].step:  # one of several rows of the step may lack a value
                numbers_of_it = {name: value for name, value in metrics.items() if not math.isnan(value)}
                metrics = {**history.rows.pop().metrics, **numbers_of_it}
            steps.add(step)
            history.rows.append(Row(step=step, metrics=metrics))
    declare_no_reference(history, logged)
    return history


def _unmeasured(rows: Logged, logged: set[str]) -> set[str]:
    """The names that are NaN in every row, in a run that went on: nobody measured them."""
    numbers = {name: [x for _, row in rows if (x := as_number(row.get(name))) is not None] for name in logged}
    alive = {name for name in logged if own_name(name) in ALIVE}
    if not any(map(math.isfinite, (x for name in alive for x in numbers[name]))):
        return set()
    return {name for name, values in numbers.items() if name not in alive and values and all(map(math.isnan, values))}


def _kl_as_it_is(rows: Logged, names: Names, logged: set[str], theirs: Names) -> Names:
    """The names of the metrics, where a KL that is called a k3 and is below 0 is a k1."""
    columns = [column for column in logged if own_name(column, theirs) == "kl/k3"]
    for column in [names["kl/k3"]] if "kl/k3" in names else columns:
        if any(round(x, 6) < 0 for _, row in rows if math.isfinite(x := as_number(row.get(column)) or 0.0)):
            names = {ours: name for ours, name in names.items() if ours != "kl/k3"} | {"kl/k1": column}
    return names


def _no_numbers(rows: Logged, theirs: Names, unmeasured: set[str]) -> list[str]:
    """What a reader should know of values that were not read: NaN in every row, or no number at all."""
    text = "is NaN in every row while training went on: nobody measured it (TRL and Unsloth do not at beta 0)"
    cautions = [f"{name} {text}" for name in sorted(unmeasured) if (own_name(name, theirs) or "").startswith("kl/")]
    logged = dict.fromkeys(name for _, row in rows for name in row)
    for name in (name for name in logged if own_name(name, theirs)):
        values = [(step, x) for step, row in rows if (x := row.get(name)) is not None and as_number(x) is None]
        for step, value in values[:1]:
            text = f"{name} is no number in {len(values)} of {len(rows)} rows, first at step {step}"
            cautions.append(f"{text}: {str(value)[:40]}")
    return cautions


def _of_rows(source: str, rows: Sequence[Mapping[str, Any]], names: Names | None, path: Path, **more: Any) -> History:
    """The history of rows that hold their step; if no row does, they are counted, and a caution says so."""
    steps = list(map(step_of, rows))
    without_steps = all(step is None for step in steps)
    numbered: list[tuple[int, Mapping[str, Any]]] = []
    last = next((step for step in steps if step is not None), 0)
    for number, (step, row) in enumerate(zip(steps, rows, strict=True), start=1):
        last = number if without_steps else last if step is None else step
        numbered.append((last, row))
    history = _history(source, numbered, names, path, **more)
    if without_steps and history.rows:
        history.settings = replace(history.settings, steps_counted=True)
        history.cautions.append("no column says the step: rows are counted, and the first need not be the first step")
    return history


def read_metrics(path: Path, names: Names | None = None) -> History:
    """Read the history in a JSONL file with the metrics of one step per line."""
    lines = list(json_lines(path))
    source = "verl file log" if lines and is_verl_line(lines[0]) else "JSONL metrics"
    return _with_metrics(source, [row for row in map(flat, lines) if row], names, path)


def _with_metrics(source: str, rows: Sequence[Config], names: Names | None, path: Path, **more: Any) -> History:
    history = _of_rows(source, rows, names, path, **more)
    if not (history.rows or history.evaluations):
        why = f"the first row has {', '.join(list(rows[0])[:12])}" if rows else "it holds no whole line"
        names_of_metrics = "names as TRL, verl or klamp write them (kl, reward, ...), or --map with your own"
        fix = f"metrics: a row per step with {names_of_metrics}; {TOKEN_LISTS}"
        raise unreadable("no metric that klamp reads and no token log-probabilities were found", path, why=why, fix=fix)
    return history


# --- texts: what a trainer prints, a table of a notebook, a chart's export -------------------------------------

JSON = re.compile(r"[{\[]\s*(?:[\[{\"}]|$)")
"""How a line of JSON begins; `[2026-...` and `{'use_kl_loss': ...` do not."""
SWITCH = re.compile(rf"\b({'|'.join(chain(*SWITCHES))})['\"]?\s*[:=]\s*(\w[\w.]*)")
COLOR = re.compile(r"\x1b\[[\d;]*m")
FLAGS = {"True", "False", "true", "false"}  # in a printed row without a step: it is a configuration
MARK = re.compile(r"\b(?:step|iter(?:ation)?)[ :=#]*(\d+)\b(?:/\d+)?(.*)", re.IGNORECASE)
"""A step in a line, after which its values stand, there or in the lines below."""
PAIR = re.compile(r"([a-z][\w./@ -]*?)\s*[:=]\s*(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))(%?)", re.IGNORECASE)
CONSOLE = re.compile(r"\bstep:\s*(\d+) - (\S.*)")
"""A line that verl prints: its step, then NAME:VALUE with ` - ` between."""
PRINTED = re.compile(r"\{'[^{}]*\}")
"""A row that transformers prints, as Python writes a dict; a progress bar may stand before it."""
ROW = re.compile(r"\{['\"][^{}]*\}")
"""A printed dict, or an object of JSON behind the time and the level of a log."""
NUMPY = re.compile(r"\b(?:np|numpy)\.\w+\(([^()]*)\)")
BARE = re.compile(r"(?<![\w'])-?(nan|inf|NaN|Infinity|null|true|false)(?![\w'])")
"""A number that is not a Python literal."""
GAP = re.compile(r" {2,}")
"""What stands between the columns of a table that is aligned with spaces."""
OF_CHARTS = ("__MIN", "__MAX")
"""How the columns of W&B's export end that are the same curve once more."""


def read_text(path: Path, names: Names | None = None) -> History:
    """Read the history in what a trainer printed, or in a table of a notebook or of a chart."""
    lines = [COLOR.sub("", line).strip("\r\n") for line in text_lines(path) if line.strip()]
    rows = next(filter(None, (list(parse(lines)) for parse in (_console, _printed, _marked))), [])
    rows = rows or list(_table(lines, path) if lines else ())
    if not rows:
        raise unreadable("a text has no rows of metrics", path, why="it has neither a table nor values after a step")
    switches = dict(SWITCH.findall("\n".join(lines)))
    return _with_metrics("text of a log", rows, names, path, config=switches)


def _console(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for match in filter(None, map(CONSOLE.search, lines)):
        pairs = (part.rpartition(":") for part in match[2].split(" - "))
        yield {"step": match[1], **{name.strip(): NUMPY.sub(r"\1", value.strip()) for name, _, value in pairs if name}}


def _printed(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for match in (match for line in lines for match in ROW.finditer(line)):
        try:
            row = ast.literal_eval(BARE.sub(r"'\g<0>'", NUMPY.sub(r"\1", match[0])))
        except (ValueError, SyntaxError, RecursionError):
            continue
        if isinstance(row, dict) and (FLAGS.isdisjoint(map(str, row.values())) or step_of(row) is not None):
            mark = MARK.search(match.string[: match.start()]) if step_of(row) is None else None
            yield {**({"step": mark[1]} if mark else {}), **{str(name): value for name, value in row.items()}}


def _marked(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of `name: value` pairs after a step, as NeMo-RL, prime-rl and torchtune print them."""
    rows: dict[str, dict[str, Any]] = {}
    row: dict[str, Any] = {}
    for line in lines:
        if mark := MARK.search(line):
            row = rows.setdefault(mark[1], {"step": mark[1]})
        for name, value, percent in PAIR.findall(mark[2] if mark else line):
            row[re.sub(r"[ .]+", "_", name.lower())] = float(value) / (100 if percent else 1)
    yield from (row for row in rows.values() if len(row) > 1)


def _table(lines: Sequence[str], path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table, one column of which counts steps, with tabs, commas, bars or spaces between columns."""
    between = max("\t|,", key=lines[0].count)
    if between not in lines[0]:  # columns aligned by blanks
        lines = [GAP.sub("\t", line.strip()) for line in lines]
        between = "\t"
    head, *rows = csv.reader((line.strip().strip("|") if between == "|" else line for line in lines), delimiter=between)
    names = _columns([name.strip() for name in head], path)
    if not any("step" in name.lower() for name in names):
        return
    for row in rows:
        cells = {name: text for name, value in zip(names, row, strict=False) if name and (text := value.strip())}
        if any(part.isdigit() for part in cells.get(next(n for n in names if "step" in n.lower()), "")):
            yield cells


def _columns(head: Sequence[str], path: Path) -> list[str]:
    """The metrics' names in a table's head; `RUN - NAME`, as W&B exports a chart, without the run, which is one."""
    split: list[tuple[str, str]] = []
    for name in head:
        run, _, rest = name.rpartition(" - ")
        split.append((run, "" if rest.endswith(OF_CHARTS) else rest.replace(" / ", "/")))
    runs = sorted({run for run, name in split if run and name})
    if len(runs) > 1:
        fix = "export the chart with one run alone, or the run itself (docs/doctor.md says how)"
        raise unreadable("a table has several runs", path, why=", ".join(runs[:6]), fix=fix)
    return [name for _, name in split]


# --- trainer_state.json ---------------------------------------------------------------------------------------


def find_state(path: Path) -> Path | None:
    """Find the trainer_state.json of a folder or of its newest checkpoint."""
    for file in (path / TRAINER_STATE, path / REPORT / TRAINER_STATE):
        if file.is_file():
            return file
    files = [file for file in path.glob(f"checkpoint-*/{TRAINER_STATE}") if file.parent.name[11:].isdigit()]
    return max(files, key=lambda file: int(file.parent.name[11:]), default=None)


def read_trl_state(path: Path, names: Names | None = None) -> History:
    """Read the history in a trainer_state.json."""
    state = object_in(path)
    logs = state.get("log_history")
    if logs is None and (by_metric := _by_metric(state)):
        return _with_metrics("table by metric", by_metric, names, path)
    if not isinstance(logs, list):
        raise unreadable("a trainer state has no log_history", path, why="without logged rows there is no history")
    rows = list(each_row(logs, path, flat, what="row {} of log_history is damaged"))
    others = {*STEP_NAMES} - {"step"}  # the trainer's own count wins over any other
    rows = [{name: value for name, value in row.items() if name not in others or "step" not in row} for row in rows]
    return _of_rows("TRL trainer state", rows, names, path, ours=False)


def _by_metric(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an object {metric: {step: value}}, as NeMo-RL writes its metrics.json; none of any other object."""
    if not all(isinstance(values, dict) and all(map(str.isdigit, values)) for values in table.values()):
        return []
    steps = sorted({int(step) for values in table.values() for step in values})
    return [
        {"step": step, **{name: values[str(step)] for name, values in table.items() if str(step) in values}}
        for step in steps
    ]


# --- TensorBoard ----------------------------------------------------------------------------------------------

EVENTS = "events.out.tfevents*"


def event_folders(path: Path) -> list[Path]:
    """All folders below a path that hold event files."""
    return sorted({with_end(file).parent for file in path.rglob(EVENTS)})


def read_tensorboard(path: Path, names: Names | None = None) -> History:
    """Read the history in a folder of event files, or in a single one, with tensorboard's own reader."""
    folders = [path] if path.is_file() else event_folders(path)
    runs = [(*events, folder) for folder in folders if (events := _read_events(folder))[0]]  # else arguments alone
    runs.sort(key=lambda events: min(events[0]))
    if any(max(before) >= min(after) for (before, *_), (after, *_) in pairwise(runs)):
        why = ", ".join(str(folder.relative_to(path)) for *_, folder in runs)
        fix = "name one of them; put all event files of one resumed run into one folder"
        raise unreadable("several TensorBoard runs are below one folder", path, why=why, fix=fix)
    scalars = {step: row for rows, *_ in runs for step, row in rows.items()}
    config = {name: value for _, events, _ in runs for name, value in events.items()}
    if not scalars:
        raise unreadable("there are no scalars in the event files", path, why="nothing was logged as a scalar")
    rows = [(step, scalars[step]) for step in sorted(scalars)]
    return _history("TensorBoard", rows, names, path, config=config)


def _read_events(path: Path) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
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
    for name in (name for name in events.Tags()["tensors"] if name.startswith("args")):
        arguments = _value(b"".join(events.Tensors(name)[-1].tensor_proto.string_val).decode("utf-8", "replace"))
        config |= arguments if isinstance(arguments, dict) else {}
    return rows, config


def _value(text: str) -> Any:
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
    files = {followed(file) for pattern in ("*.wandb", "*/*.wandb", "wandb/*/*.wandb") for file in path.glob(pattern)}
    return sorted(files)


def read_wandb(path: Path, names: Names | None = None) -> History:
    """Read the history in the file of an offline run; the messages are read with wandb."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise missing_library("wandb", by=f"the record {path}") from error
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
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
            items = record.history.item
            rows.append({"/".join(item.nested_key) or item.key: _value(item.value_json) for item in items})
    if not rows:
        raise unreadable("nothing was logged in the W&B run", path, why="it has no history")
    return _of_rows("W&B offline run", rows, names, path, config=config)


def frames(path: Path) -> Iterator[bytes]:
    """The records of a file, from its blocks, for which wandb has no reader in Python; ignores a half-written one."""
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
