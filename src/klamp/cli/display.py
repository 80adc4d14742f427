"""The progress of a run, or of the runs of an ablation: single lines; a terminal has a bar and a table below them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from klamp.ablation.plan import Run
from klamp.ablation.results import Outcome
from klamp.cli.describe import describe_task
from klamp.cli.text import MISSING, duration, fixed, say, visible
from klamp.config.describe import describe_controller, describe_kl, describe_teacher
from klamp.diagnostics.doctor import Finding
from klamp.report.run import ScoreFormat
from klamp.training.config import TrainConfig
from klamp.training.observers import SAID_ELSEWHERE, Observer, RunInfo


class StepColumn(NamedTuple):
    """One column of the table of steps: its heading, its metric, and the function that writes a value."""

    title: str
    metric: str
    write: Callable[[float], str]

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The metric's value as text; "-" if it is missing."""
        return self.write(metrics[self.metric]) if self.metric in metrics else MISSING


COLUMNS = (
    StepColumn("reward", "reward", fixed(3)),
    StepColumn("KL k1", "kl/k1", fixed(4)),
    StepColumn("KL k3", "kl/k3", fixed(4)),
    StepColumn("exact", "kl/exact", fixed(4)),
    StepColumn("teacher", "teacher/kl", fixed(4)),
    StepColumn("over", "kl/over_budget", "{:.1%}".format),
    StepColumn("beta", "beta", "{:.3g}".format),
    StepColumn("length", "length/mean", fixed(1)),
    StepColumn("entropy", "policy/entropy", fixed(3)),
    StepColumn("clip", "policy/ratio_clipped", "{:.1%}".format),
    StepColumn("lr", "train/learning_rate", "{:.3g}".format),
    StepColumn("tok/s", "speed/tokens_per_second", "{:,.0f}".format),
)
LEGEND = (
    "KL in nats per token; over: completions past the KL budget; clip: tokens past a ratio bound; "
    "tok/s: sampled and trained"
)
ROWS, LINES, LOADING_LINES = 12, 20, 5
"""Steps in the table of a terminal; lines for the steps of a run in a log; lines for the work before the first step."""


def columns_for(config: TrainConfig) -> list[StepColumn]:
    """The columns that a run of this configuration has."""
    empty = {"kl/over_budget"} if config.kl.kl_clip_method == "none" else set()
    empty |= set() if config.teacher.there else {"teacher/kl"}
    return [column for column in COLUMNS if column.metric not in empty]


class Drawn(Observer):
    """Lines as they come, and on a terminal a bar below them."""

    def __init__(self, console: Console) -> None:
        self.console, self.draws = console, console.is_terminal and not console.is_dumb_terminal
        times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
        self.progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
        self.bar = self.progress.add_task("", visible=False)
        self.started = time.monotonic()
        self.live = Live(console=console, get_renderable=self.picture, refresh_per_second=4)

    def move(self, description: str, done: int, total: int) -> None:
        """Set the bar; on a terminal, begin to draw."""
        self.progress.update(self.bar, description=description, completed=done, total=total, visible=True)
        if self.draws:
            self.live.start()

    def close(self) -> None:
        """Stop drawing; the last picture stays on the screen."""
        self.live.stop()

    def say(self, text: str) -> None:
        """Write a line at once; a reader that has left, as in `klamp train | head`, does not end the run."""
        with suppress(BrokenPipeError):
            if self.console.is_terminal:  # above what is drawn there
                self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
            else:
                say(text, file=self.console.file)

    def elapsed(self) -> str:
        """The time since the start, as text."""
        return f"{duration(time.monotonic() - self.started)} elapsed"

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Show the progress of the work before the first step."""
        self.move(f"{what}, once", done, total)
        if not self.draws and (done in (1, total) or done % max(1, total // LOADING_LINES) == 0):
            self.say(f"{what}: {done}/{total}" + ("" if loss is None else f", loss {loss:.3f}"))

    def picture(self) -> RenderableType:
        """The bar."""
        return self.progress.get_renderable()


class Display(Drawn):
    """One run: evaluations, cautions, alarms and some steps are lines; a terminal has the last steps in a table."""

    def __init__(self, console: Console) -> None:
        self.info: RunInfo | None = None
        self.rows: deque[list[str]] = deque(maxlen=ROWS)
        self.before: Mapping[str, float] = {}
        self.warnings: set[str] = set()
        self.raised: set[str] = set()
        super().__init__(console)

    def on_start(self, info: RunInfo) -> None:
        """Write the heading of the run; its time counts from here."""
        self.info, self.started = info, time.monotonic()
        self.columns = columns_for(info.config)
        self.say("\n".join([*heading(info), "", LEGEND]))
        self.progress.reset(self.bar)
        self.move("step", info.start_step, info.config.run.max_steps)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's row; a log has a line for the first step, the last, and about twenty between."""
        assert self.info is not None
        start, last = self.info.start_step, self.info.config.run.max_steps
        cells = [column.cell(metrics) for column in self.columns]
        self.rows.append([str(step), *cells])
        self.move("step", step, last)
        if not self.draws and (step in (start + 1, last) or step % max(1, -(-(last - start) // LINES)) == 0):
            values = ", ".join(f"{column.title} {cell}" for column, cell in zip(self.columns, cells, strict=True))
            self.say(f"step {step}/{last}: {values}")

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores in a line, with their change since the start."""
        first = self.info is not None and step == self.info.start_step
        self.before = scores if first else self.before
        scale = ScoreFormat.fitting(self.before, scores)
        changes = {
            skill: "" if first or skill not in self.before else f" ({scale.change(self.before[skill], score)})"
            for skill, score in scores.items()
        }
        texts = ", ".join(f"{skill} {scale.write(score)}{changes[skill]}" for skill, score in scores.items())
        self.say(f"  evaluation after step {step}: {texts}   [{self.elapsed()}]")

    def on_warning(self, text: str) -> None:
        """Write a warning; the same text is written once."""
        if text not in self.warnings:
            self.warnings.add(text)
            self.say(f"  caution: {text}")

    def on_alarm(self, finding: Finding) -> None:
        """Write an alarm and its next step; no notes, and nothing that a caution has."""
        self.raised.add(finding.alarm.name)
        if finding.alarm.level == "alarm" and finding.alarm.name not in SAID_ELSEWHERE:
            self.say(f"  {finding.in_a_line}\n    next step: {finding.alarm.next_step}")

    def picture(self) -> RenderableType:
        """The bar and the last steps."""
        if self.info is None:
            return super().picture()
        table = Table("step", *(column.title for column in self.columns), box=None, header_style="")
        for column in table.columns:
            column.justify, column.no_wrap = "right", True
        for row in list(self.rows)[-max(1, self.console.height - 4) :]:
            table.add_row(*row)
        return Group(super().picture(), table)


class Board(Drawn):
    """An ablation: a line when a run starts and when it ends."""

    def __init__(self, console: Console, runs: int) -> None:
        self.runs, self.ended = runs, 0
        super().__init__(console)

    def tell(self, run: Run, outcome: Outcome | None) -> None:
        """Write a line for a run that starts (no outcome) or has ended."""
        self.ended += outcome is not None
        self.move("runs", self.ended, self.runs)
        text = "started" if outcome is None else f"failed: {outcome.error.partition(chr(10))[0]}"
        if outcome is not None and outcome.state == "done":
            values = (("reward", "reward", 3), ("KL", "kl/reverse", 4), ("length", "length", 1))
            texts = (f"{name} {fixed(n)(outcome.numbers[key])}" for name, key, n in values if key in outcome.numbers)
            text = ", ".join(("done", *texts))
        self.say(f"[{self.ended}/{self.runs} ended, {self.elapsed()}] {run.arm.name}, seed {run.seed}: {text}")


def heading(info: RunInfo) -> list[str]:
    """The heading of a run: its task, model, KL and folder in a few lines."""
    config = info.config
    some = "" if info.trainable_parameters == info.parameters else f", {_count(info.trainable_parameters)} trained"
    again = f" · continued after step {info.start_step}" if info.start_step else ""
    model = f"{config.model.model}, {_count(info.parameters)} parameters{some}"
    lines = [f"{describe_task(config)} · {model} · {info.device}", f"KL: {describe_kl(config.kl)}"]
    if config.kl.needs_reference:
        lines.append(f"reference: {info.reference} · beta: {describe_controller(config.kl)}")
    lines += [f"teacher: {describe_teacher(config.teacher)}"] if config.teacher.there else []
    lines += [f"changed: {info.changes}"] if info.changes else []
    return [*lines, f"folder: {info.output_dir}{again}"]


def _count(parameters: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{letter}"
    return str(parameters)


def skill_rows(before: Mapping[str, float], after: Mapping[str, float], trained: str = "") -> list[tuple[str, ...]]:
    """Every skill with its score before, its score after and the change, as text; the trained one first."""
    scores = ScoreFormat.fitting(before, after)
    return [
        (
            f"{skill} (trained)" if skill == trained else skill,
            scores.write(before.get(skill)),
            scores.write(after.get(skill)),
            scores.change(before.get(skill), after.get(skill)),
        )
        for skill in sorted({**before, **after}, key=lambda name: name != trained)
    ]
