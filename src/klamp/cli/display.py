"""What every display of a run knows: its last steps, the curves of reward and KL, scores, warnings, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console

from klamp.cli.columns import duration
from klamp.cli.describe import describe_task
from klamp.cli.loading import Loading
from klamp.config.describe import describe_controller, describe_kl
from klamp.diagnostics.doctor import Finding
from klamp.training.alarms import SAID_ELSEWHERE
from klamp.training.observers import Observer, RunInfo

ROWS = 12
COURSES = ("reward", "kl/k3", "kl/exact")
"""Metrics of which the value of every step is kept, for the curves."""


class Display(Observer):
    """Base of the displays of a run: an observer that keeps what they show."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.info: RunInfo | None = None
        self.rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=ROWS)
        self.course: dict[str, list[float]] = {metric: [] for metric in COURSES}
        self.before: dict[str, float] = {}
        self.now: dict[str, float] = {}
        self.evaluated_at = 0
        self.warnings: list[str] = []
        self.alarms: list[str] = []
        self.raised: set[str] = set()
        self.loading: Loading | None = None
        self.started = self.clock()

    def clock(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Keep how far the work before the run is."""
        self.loading = Loading(what, done, total, loss)

    def on_start(self, info: RunInfo) -> None:
        """Keep the facts about the run; its time counts from here."""
        self.info, self.loading, self.started = info, None, self.clock()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""
        self.rows.append((step, metrics))
        for metric, course in self.course.items():
            if metric in metrics:
                course.append(metrics[metric])

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Keep the scores of an evaluation; those before the first step are kept apart."""
        if self.info is not None and step == self.info.start_step:
            self.before = dict(scores)
        self.now, self.evaluated_at = dict(scores), step

    def on_warning(self, text: str) -> None:
        """Keep a warning; the same text is kept once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def on_alarm(self, finding: Finding) -> None:
        """Keep an alarm."""
        self.raised.add(finding.alarm.name)
        if is_shown(finding):
            self.alarms.append(finding.in_a_line)

    def curves(self) -> list[tuple[str, list[float]]]:
        """The curves over the whole run: the reward, and the KL in nats per token by its best estimate."""
        exact = list(self.course["kl/exact"])
        kl = ("KL exact", exact) if exact else ("KL k3", list(self.course["kl/k3"]))
        return [("reward", list(self.course["reward"])), kl]

    @property
    def step(self) -> int:
        """Number of steps done, including those before the run was continued."""
        start = self.info.start_step if self.info else 0
        return self.rows[-1][0] if self.rows else start

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.started

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None before the first step."""
        if self.info is None or self.step <= self.info.start_step:
            return None
        per_step = self.seconds / (self.step - self.info.start_step)
        return per_step * max(0, self.info.config.run.max_steps - self.step)

    def time_text(self) -> str:
        """The time that has passed and the time left, as text."""
        left = self.seconds_left
        return f"{duration(self.seconds)} elapsed" + ("" if left is None else f", {duration(left)} left")

    def heading(self) -> list[str]:
        """The heading of a run: its task, model, KL and folder in a few lines."""
        assert self.info is not None
        info, config = self.info, self.info.config
        some = "" if info.trainable_parameters == info.parameters else f", {_count(info.trainable_parameters)} trained"
        where = info.device + (f", {info.processes} processes" if info.processes > 1 else "")
        again = f" · continued after step {info.start_step}" if info.start_step else ""
        held = [f"KL: {describe_kl(config.kl)}"]
        if config.kl.needs_reference:
            held.append(f"reference: {info.reference} · beta: {describe_controller(config.kl)}")
        size = f", {_count(info.parameters)} parameters{some}" if info.parameters else ""
        return [
            f"{describe_task(config)} · {config.model.model}{size} · {where}",
            *held,
            f"folder: {info.output_dir}{again}",
        ]


def is_shown(finding: Finding) -> bool:
    """Whether a display shows an alarm; notes are not shown, nor alarms that a caution has told already."""
    return finding.alarm.level == "alarm" and finding.alarm.name not in SAID_ELSEWHERE


def _count(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{letter}"
    return str(parameters)
