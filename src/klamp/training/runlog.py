"""Writes the folder of a run: configuration, versions, metrics, completions; and feeds TensorBoard and W&B."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from klamp._version import __version__
from klamp.diagnostics.doctor import Finding
from klamp.errors import ConfigError, RunFolderError
from klamp.names import ALARMS_FILE
from klamp.training.checkpoint import tidy
from klamp.training.config import TrainConfig
from klamp.training.folders import (
    ANSWERS,
    CAUTIONS,
    COMPLETIONS,
    CONFIG,
    METRICS_FILE,
    SCORE,
    SUMMARY,
    VERSIONS,
    lines_of,
    lost,
    row_of,
    step_of,
    unwritable,
    write_whole,
)
from klamp.training.observers import Observer, RunInfo, RunSummary
from klamp.training.resumed import PLACE, plain, read, with_history

PACKAGES = (
    *("torch", "transformers", "trl", "peft", "datasets", "tokenizers", "safetensors"),
    *("verl", "ray", "vllm"),
)


def versions() -> dict[str, str]:
    """The versions of klamp, Python and the packages that numbers depend on."""
    found = {"klamp": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"torch_threads": str(torch.get_num_threads())}


class Tracker(NamedTuple):
    """Where metrics are shown besides the run's own files."""

    log: Callable[[Mapping[str, float], int], object]
    """Shows the values of a step."""
    close: Callable[[], object]
    """Writes what is left."""


def tensorboard(folder: Path, config: TrainConfig, done: int) -> Tracker:
    """Scalars in the folder `tracking` of a run; what a killed run left of steps after `done` is no longer shown."""
    from torch.utils.tensorboard import SummaryWriter

    purge = (done + 1 if done else 0) if config.run.resume else None
    writer = SummaryWriter(str(folder / "tracking"), purge_step=purge)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def wandb(folder: Path, config: TrainConfig, done: int) -> Tracker:
    """A run of Weights & Biases, with its files in the run's folder."""
    import wandb

    run = wandb.init(project="klamp", dir=str(folder), config=plain(config))
    return Tracker(lambda values, step: run.log(dict(values), step=step), run.finish)


TRACKERS: Mapping[str, Callable[[Path, TrainConfig, int], Tracker]] = {"tensorboard": tensorboard, "wandb": wandb}


def check_trackers(config: TrainConfig) -> None:
    """Refuse a tracker that is unknown or not installed.

    Raises:
        ConfigError: names it.
    """
    missing = [name for name in config.run.report_to if name not in TRACKERS or find_spec(name) is None]
    if missing:
        raise ConfigError(
            "a tracker cannot be used",
            got=f"report_to={config.run.report_to}",
            why=f"klamp does not know it, or it is not installed: {', '.join(missing)}",
            fix=f"use {' or '.join(TRACKERS)}, install its package, or leave it out of report_to",
        )


def _refused(path: Path, error: OSError, *, done: int) -> RunFolderError:
    """The error for a run that cannot write before its first step, or before the first one that it goes on with."""
    if not done:
        return unwritable(path, f"{type(error).__name__}: {error}")
    found = lost(path, error)
    found.add_note(f"  the checkpoint of step {done} is as it was")
    return found


class RunLog(Observer):
    """An observer that writes the files of a run and feeds the trackers."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []
        self.folder: Path | None = None
        self.step = 0
        self.said: set[str] = set()

    def on_start(self, info: RunInfo) -> None:
        """Write configuration and versions; on resume, delete what is of later steps, and what a killed run left.

        A run that goes on from its first step is written anew, as one that was never killed: whoever takes its
        configuration for another run continues none.
        """
        self.folder = info.output_dir
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_configuration(self.folder, info)
            write_whole(self.folder / VERSIONS, json.dumps(versions(), indent=2))
            for name in (METRICS_FILE, COMPLETIONS, ANSWERS, ALARMS_FILE, CAUTIONS):
                _keep_until(self.folder / name, info.start_step or -1)
            tidy(self.folder, keep=info.config.run.keep_checkpoints)
            for name in info.config.run.report_to:
                self.trackers.append(TRACKERS[name](self.folder, info.config, info.start_step))
        except OSError as error:
            raise _refused(self.folder, error, done=info.start_step) from error
        self.step = info.start_step
        self.said = {str(row.get("text")) for row in lines_of(self.folder / CAUTIONS)}

    def _write_configuration(self, folder: Path, info: RunInfo) -> None:
        """Write what is in force from here on, and what was before; a resume that changes nothing writes nothing."""
        past = read(folder) if info.start_step and (folder / CONFIG).is_file() else {}
        now = with_history(info.config, past, info.start_step)
        if now != past | {name: now[name] for name in PLACE}:
            write_whole(folder / CONFIG, yaml.safe_dump(now, sort_keys=False))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics as a line of metrics.jsonl, and to the trackers."""
        self.step = step
        self._append(METRICS_FILE, {"step": step, **metrics})
        self._track(metrics, step)

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores as eval/SKILL, to the same places as metrics."""
        named = {f"{SCORE}{skill}": value for skill, value in scores.items()}
        self._append(METRICS_FILE, {"step": step, **named})
        self._track(named, step)

    def on_answers(self, step: int, rows: list[dict[str, object]]) -> None:
        """Write the answers as lines of answers.jsonl."""
        self._append(ANSWERS, *({"step": step, **row} for row in rows))

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        """Write the completions as lines of completions.jsonl."""
        self._append(COMPLETIONS, *({"step": step, **row} for row in rows))

    def on_alarm(self, finding: Finding) -> None:
        """Write the alarm as a line of alarms.jsonl."""
        self._append(ALARMS_FILE, finding.record)

    def on_warning(self, text: str) -> None:
        """Write the caution as a line of cautions.jsonl, with the number of steps done; each one once in a run."""
        if text not in self.said:
            self.said.add(text)
            self._append(CAUTIONS, {"step": self.step, "text": text})

    def on_end(self, summary: RunSummary) -> None:
        """Write the summary."""
        content = {name: value for name, value in vars(summary).items() if name != "output_dir"}
        with self._writing() as folder:
            write_whole(folder / SUMMARY, json.dumps(content, indent=2))

    @contextmanager
    def _writing(self) -> Iterator[Path]:
        """A context with the run's folder, in which a full disk is an error of klamp."""
        assert self.folder is not None
        try:
            yield self.folder
        except OSError as error:
            raise lost(self.folder, error) from error

    def _append(self, name: str, *rows: Mapping[str, object]) -> None:
        with self._writing() as folder, (folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))

    def _track(self, values: Mapping[str, float], step: int) -> None:
        with self._writing():
            for tracker in self.trackers:
                tracker.log(values, step)

    def close(self) -> None:
        """Close the trackers, each as far as it can: one that could not write fails at its end too."""
        while self.trackers:
            with suppress(OSError):
                self.trackers.pop().close()


def _keep_until(file: Path, step: int) -> None:
    """Delete the lines of later steps, which a resumed run writes again, and those that nobody can read."""
    if not file.exists():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    kept = "".join(f"{line}\n" for line in text.splitlines() if step_of(row_of(line)) <= step)
    if kept != text:
        write_whole(file, kept)
