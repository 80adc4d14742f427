"""The hooks by which a run reports what happens: alarms, the files of the run's folder, TensorBoard and W&B."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
import yaml

from klamp._version import __version__
from klamp.doctor.examine import AlarmFinding, AlarmWatch
from klamp.doctor.history import History, RunSettings
from klamp.doctor.metrics import settings_of_run
from klamp.doctor.readers.klamp_run import PLACE, read_klamp_run
from klamp.doctor.readers.rollouts import completion_of
from klamp.errors import ConfigError, DataError, TrainingStopped
from klamp.hosts.common.versions import hardware, installed_version
from klamp.lab import folders
from klamp.lab.config import TrainConfig
from klamp.lab.folders import lines_of, write_whole
from klamp.names import ALARMS_FILE, ANSWERS, CAUTIONS, COMPLETIONS, CONFIG, METRICS_FILE, SUMMARY, VERSIONS


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known of a run before its first step."""

    config: TrainConfig  # the configuration in force
    output_dir: Path  # the folder of the run
    start_step: int  # 0, or the step a resumed run continues from
    parameters: int  # parameters of the policy, without an adapter's
    trainable_parameters: int  # the number of parameters that are trained
    device: str  # the device of the policy
    changes: str = ""  # what a resume changed, in words


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run achieved."""

    output_dir: Path  # the folder of the run
    steps: int  # the number of steps that are done
    seconds: float  # the time that this process took, in seconds
    rl_skill: str  # the skill that was trained
    before: Mapping[str, float]  # skill -> score before training
    after: Mapping[str, float]  # skill -> score after training
    final_metrics: Mapping[str, float] = field(default_factory=dict)  # the metrics of the last step


class Observer:
    """The hooks of a run, for a subclass to override."""

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Called while something slow happens before the run: `done` of `total`, with its loss where it has one."""

    def on_start(self, info: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when step `step` (from 1) is done; the metrics are described in `klamp.doctor.metrics`."""

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Called when the skills were evaluated after `step` steps: skill -> mean score."""

    def on_answers(self, step: int, rows: list[dict[str, object]]) -> None:
        """Called with some greedy answers of an evaluation."""

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        """Called with a sample of the step's completions."""

    def on_alarm(self, finding: AlarmFinding) -> None:
        """Called when an alarm rose, once per alarm in a run; see `klamp.doctor.alarms`."""

    def on_warning(self, text: str) -> None:
        """Called with a caution: what the user should know, and what to do."""

    def on_end(self, summary: RunSummary) -> None:
        """Called when the run is over."""

    def close(self) -> None:
        """Called last, even after an error, and once only."""


class AlarmObserver(Observer):
    """Examines the run with every alarm after each step and evaluation; `tell` reaches all observers."""

    def __init__(self, tell: Callable[[Callable[[Observer], None]], None], *, rl_skill: str) -> None:
        self.tell, self.rl_skill, self.watch = tell, rl_skill, AlarmWatch(RunSettings())

    def on_start(self, info: RunInfo) -> None:
        """Keep the configuration, and take up the record of the steps before a checkpoint, unless it is damaged."""
        settings = settings_of_run(info.config.flat(), rl_skill=self.rl_skill)
        names = {row["name"] for row in lines_of(info.output_dir / ALARMS_FILE) if isinstance(row.get("name"), str)}
        self.watch = AlarmWatch(settings, reported=names, stop_on=info.config.run.stop_on)
        with suppress(DataError, ConfigError):
            past = read_klamp_run(info.output_dir) if info.start_step else History()
            completions = chain.from_iterable(past.completions.values())
            self.watch.keep(rows=past.rows, evaluations=past.evaluations, completions=completions)

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        self.watch.keep(completions=[completion_of(row, step=step, written=True) for row in rows])

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._report(self.watch.step(step, metrics))

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._report(self.watch.evaluation(step, scores))

    def _report(self, findings: Sequence[AlarmFinding]) -> None:
        for finding in findings:
            self.tell(lambda observer, finding=finding: observer.on_alarm(finding))


def stopped_by(finding: AlarmFinding, after: str) -> TrainingStopped:
    """The error that ends a run at an alarm of stop_on, `after` a step or update, in words."""
    alarm, evidence = finding.alarm, finding.evidence
    what = f"training was stopped after {after} by the alarm {alarm.name}: {alarm.text}"
    why = " ".join((*evidence.causes[:1], alarm.means, alarm.next_step))
    fix = "mend that and start again, or leave the name out of stop_on and continue with --resume"
    return TrainingStopped(what, got=evidence.text, resumable=True, why=why, fix=fix)


PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "tokenizers", "safetensors", "verl", "ray", "vllm")


def versions(*, cpu: bool = False) -> dict[str, str]:
    machine = {"klamp": __version__, "python": platform.python_version(), "platform": platform.platform()}
    machine |= {"hardware": hardware(cpu=cpu)}
    packages = {package: installed_version(package) or "not installed" for package in PACKAGES}
    return {**machine, **packages, "torch_threads": str(torch.get_num_threads())}


Tracker: TypeAlias = Callable[[Mapping[str, float], int], object]  # shows the values of a step


def tensorboard(folder: Path, config: TrainConfig, done: int, ending: ExitStack) -> Tracker:
    """Scalars in the folder `tracking` of a run; what a killed run left of steps after `done` is no longer shown."""
    from torch.utils.tensorboard import SummaryWriter

    purge = (done + 1 if done else 0) if config.run.resume else None
    writer = ending.enter_context(SummaryWriter(str(folder / "tracking"), purge_step=purge))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def wandb(folder: Path, config: TrainConfig, done: int, ending: ExitStack) -> Tracker:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "klamp")
    run = wandb.init(project=project, dir=str(folder), config=folders.plain(config))
    ending.callback(run.finish)
    return lambda values, step: run.log(dict(values), step=step)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb}


def check_trackers(config: TrainConfig) -> None:
    names = config.run.report_to
    if missing := [name for name in names if name not in TRACKERS or find_spec(name) is None]:
        why = f"klamp does not know it, or it is not installed: {', '.join(missing)}"
        fix = f"use {' or '.join(TRACKERS)}, install its package, or leave it out of report_to"
        raise ConfigError("a tracker cannot be used", got=f"report_to={names}", why=why, fix=fix)


class RunLog(Observer):
    """An observer that writes the files of a run and feeds the trackers."""

    def __init__(self) -> None:
        self.trackers, self.ending = list[Tracker](), ExitStack()
        self.folder: Path | None = None
        self.step = 0
        self.cautions: set[str] = set()

    def on_start(self, info: RunInfo) -> None:
        """Write configuration and versions; on resume, delete what is of later steps, and what a killed run left."""
        self.folder, self.step = info.output_dir, info.start_step
        with self._writing() as folder:
            past = folders.read(folder) if self.step and (folder / CONFIG).is_file() else {}
            now = folders.with_history(info.config, past, self.step)
            if now != past | {name: now[name] for name in PLACE}:  # a resume that changes nothing writes nothing
                write_whole(folder / CONFIG, yaml.safe_dump(now, sort_keys=False))
            write_whole(folder / VERSIONS, json.dumps(versions(cpu=info.config.run.cpu), indent=2))
            for name in (METRICS_FILE, COMPLETIONS, ANSWERS, ALARMS_FILE, CAUTIONS):
                _keep_until(folder / name, self.step or -1)
            folders.tidy(folder, keep=info.config.run.keep_checkpoints)
            for name in info.config.run.report_to:
                self.trackers.append(TRACKERS[name](folder, info.config, self.step, self.ending))
            self.cautions = {str(row.get("text")) for row in lines_of(folder / CAUTIONS)}

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self._log(step, metrics)

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        self._log(step, {f"eval/{skill}": value for skill, value in scores.items()})

    def on_answers(self, step: int, rows: list[dict[str, object]]) -> None:
        self._append(ANSWERS, *({"step": step, **row} for row in rows))

    def on_completions(self, step: int, rows: list[dict[str, object]]) -> None:
        self._append(COMPLETIONS, *({"step": step, **row} for row in rows))

    def on_alarm(self, finding: AlarmFinding) -> None:
        self._append(ALARMS_FILE, finding.record)

    def on_warning(self, text: str) -> None:
        """Write the caution as a line of cautions.jsonl, with the number of steps done; each one once in a run."""
        if text not in self.cautions:
            self.cautions.add(text)
            self._append(CAUTIONS, {"step": self.step, "text": text})

    def on_end(self, summary: RunSummary) -> None:
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
            raise folders.unwritable(self.folder, error) from error

    def _append(self, name: str, *rows: Mapping[str, object]) -> None:
        with self._writing() as folder, (folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(row)}\n" for row in rows))

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._append(METRICS_FILE, {"step": step, **values})
        with self._writing():
            for tracker in self.trackers:
                tracker(values, step)

    def close(self) -> None:
        with suppress(OSError):  # a tracker that could not write fails at its end too
            self.ending.close()


def _keep_until(file: Path, step: int) -> None:
    """Delete the lines of later steps, which a resumed run writes again, and those that nobody can read."""
    if not file.exists():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = (line for line in text.splitlines() if folders.step_of(folders.row_of(line)) <= step)
    if (shorter := "".join(f"{line}\n" for line in lines)) != text:
        write_whole(file, shorter)
