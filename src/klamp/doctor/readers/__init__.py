"""Readers of run records: files that klamp or another program wrote become a `History` for doctor and report."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from klamp.doctor.history import History
from klamp.doctor.readers import logs, rollouts
from klamp.doctor.readers.files import json_lines, refuse_names, text_lines, unreadable
from klamp.doctor.readers.klamp_run import is_klamp_run, read_klamp_run, with_report
from klamp.files import with_end
from klamp.names import CONFIG, METRICS_FILE, VERSIONS

TOKEN_EXPORT = "step_*/rank_*.jsonl"
TEXTS = (".csv", ".tsv", ".log", ".txt")
COMPUTED = "it holds completions, and the metrics are computed from their tokens"


def read_record(path: Path, names: Mapping[str, str] | None = None) -> History:
    """Read the history of a run from a file or folder in any of the known formats; each reader raises the same errors.

    Args:
        path: what was written.
        names: klamp's name of a metric -> its name in the record, before the names that klamp reads.

    Raises:
        DataError: there is nothing there, or nothing that can be read.
        UnknownNameError: no row has one of `names`.
        ConfigError: `names` for a record whose metrics have klamp's names already.
        MissingLibrary: the library that reads the format is not installed.
    """
    if not path.exists():
        raise unreadable("there is nothing to examine", path, why="the path does not exist")
    return _read_folder(path, names) if path.is_dir() else _read_file(with_end(path), names)


def _read_file(path: Path, names: Mapping[str, str] | None) -> History:
    if path.match(logs.EVENTS) or path.suffix == ".wandb":
        return (logs.read_wandb if path.suffix == ".wandb" else logs.read_tensorboard)(path, names)
    start = list(islice((line.lstrip() for line in text_lines(path) if line.strip()), 2))
    lists = path.suffix == ".json" or [line.strip() for line in start[:1]] == ["["]
    if lists and [line[:2] for line in start] != ['{"', '{"']:  # else an object in each line
        return with_report(logs.read_trl_state(path, names), path)
    first = "".join(start[:1])
    may_be_printed = path.suffix != ".jsonl" or logs.PRINTED.search(first) or logs.CONSOLE.search(first)
    if logs.PRINTED.match(first) or (may_be_printed and not (start and all(map(logs.JSON.match, start)))):
        return logs.read_text(path, names)
    row = next(json_lines(path), None)
    if row is None or not rollouts.is_rollout(row):
        return logs.read_metrics(path, names)
    refuse_names(names, path, why=COMPUTED)
    return rollouts.read_rollouts([path])


def _read_folder(path: Path, names: Mapping[str, str] | None) -> History:
    if is_klamp_run(path):
        refuse_names(names, path, why="it is the folder of a klamp run, whose metrics have klamp's names")
        return read_klamp_run(path)
    state, runs = logs.find_state(path), logs.find_offline_run(path)
    if state is not None:
        return with_report(logs.read_trl_state(state, names), path)
    if len(runs) > 1:
        folders = ", ".join(run.parent.name for run in runs)
        raise unreadable("several W&B runs are in one folder", path, why=folders, fix="name one of them")
    if runs:
        return logs.read_wandb(runs[0], names)
    if (path / CONFIG).is_file() and (path / VERSIONS).is_file() and next(path.rglob("*.jsonl"), None) is None:
        why = f"it has no {METRICS_FILE}: it was started a moment ago, or its process ended"
        fix = "look again in a moment; if its process is gone, read what it printed last (a reward may have ended it)"
        raise unreadable("a klamp run that has not finished a step", path, why=why, fix=fix)
    return _read_lines(path, names) if not logs.event_folders(path) else logs.read_tensorboard(path, names)


def _read_lines(path: Path, names: Mapping[str, str] | None) -> History:
    exports = [*path.glob(TOKEN_EXPORT), *path.glob(f"token_exports/{TOKEN_EXPORT}")]
    exports.sort(key=lambda file: (rollouts.step_in(file), file))
    files = sorted(path.glob("*.jsonl"))
    numbered = sorted((file for file in files if file.stem.isdigit()), key=lambda file: int(file.stem))
    if exports or numbered:
        refuse_names(names, path, why=COMPUTED)
        source = "prime-rl token export" if exports else "verl rollouts"
        return rollouts.read_rollouts(exports or numbered, source=source)
    for name in (METRICS_FILE, "metrics.json"):
        if (path / name).is_file():
            return _read_file(path / name, names)
    files = files or sorted(file for end in TEXTS for file in path.glob(f"*{end}"))
    if len(files) == 1:
        return _read_file(files[0], names)
    if files:
        file_names = ", ".join(file.name for file in files)
        raise unreadable("several logs are in one folder", path, why=file_names, fix="name one of them")
    raise unreadable("a folder with no record of a run", path, why="it holds none of the files that klamp reads")
