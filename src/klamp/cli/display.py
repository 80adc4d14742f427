"""A run as it goes: what both displays know, single lines for a log or pipe, one live table on a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from klamp.cli.describe import describe_task
from klamp.cli.text import GAP, STEP_WIDTH, StepColumn, aligned, columns_for, duration, legend_for
from klamp.config.describe import describe_controller, describe_kl
from klamp.diagnostics.doctor import Finding
from klamp.report.run import ScoreFormat
from klamp.training.observers import SAID_ELSEWHERE, Observer, RunInfo, RunSummary

LOADING_LINES = 5
"""Lines of such work in a log, besides its first and its last."""


@dataclass(frozen=True)
class Loading:
    """Slow work, and how far it is."""

    what: str
    done: int
    total: int
    loss: float | None

    @property
    def text(self) -> str:
        """How far it is, and its loss where it has one."""
        return f"{self.done}/{self.total}" + ("" if self.loss is None else f", loss {self.loss:.3f}")

    @property
    def line(self) -> str:
        """A line of a log."""
        return f"{self.what}: {self.text}"

    @property
    def bar(self) -> Table:
        """The work as a bar, for a terminal."""
        return bar(f"{self.what}, once", self.done, self.total, self.text)

    @property
    def is_due(self) -> bool:
        """Whether a log says it now: at the start, at the end, some times between."""
        return self.done in (1, self.total) or self.done % max(1, self.total // LOADING_LINES) == 0


def bar(title: str, done: int, total: int, text: str) -> Table:
    """A title, a bar and a text on one line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(min_width=10, max_width=36)
    grid.add_column(no_wrap=True)
    grid.add_row(Text(title, style="bold"), ProgressBar(total=max(1, total), completed=done), Text(text))
    return grid


def say(console: Console, text: str) -> None:
    """Write a line at once; a reader that has left, as that of `klamp train | head`, does not end the run."""
    with suppress(BrokenPipeError):
        if console.is_terminal:  # above what is drawn there
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        else:
            print(text, file=console.file, flush=True)


ROWS = 12
"""The most steps that the live table shows."""


class Display(Observer):
    """Base of the displays of a run: an observer that keeps what they show."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.info: RunInfo | None = None
        self.rows: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=ROWS)
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


LINES = 20
"""About how many steps of a run get a line."""
WIDTH = 120
"""Width of a line in characters; a file has none, so that all columns fit."""


class LogLines(Display):
    """The display of a run for logs and pipes: single lines, no drawing."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.columns: list[StepColumn] = []

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Write how far the work before the run is: a line at its start, some between, one at its end."""
        super().on_loading(what, done, total, loss)
        if self.loading is not None and self.loading.is_due:
            say(self.console, self.loading.line)

    def on_start(self, info: RunInfo) -> None:
        """Write the heading of the run."""
        super().on_start(info)
        self.columns = columns_for(info.config, WIDTH)
        say(self.console, "\n".join(self.heading()))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line for the first step, the last, and about twenty between; titles stand above the first."""
        assert self.info is not None
        if not self.rows:
            titles = [column.title for column in self.columns]
            say(self.console, f"\n{legend_for(self.info.config)}\n{_line('step', titles, self.columns)}")
        super().on_step(step, metrics)
        start, last = self.info.start_step, self.info.config.run.max_steps
        every = max(1, -(-(last - start) // LINES))
        if step in (start + 1, last) or step % every == 0:
            say(self.console, _line(str(step), [column.cell(metrics) for column in self.columns], self.columns))

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores in a line, with their change since the start."""
        super().on_evaluation(step, scores)
        scale = ScoreFormat.fitting(self.before, self.now)
        changes = {skill: scale.change(self.before.get(skill), score) for skill, score in scores.items()}
        texts = [
            f"{skill} {scale.write(score)}"
            + (f" ({changes[skill]})" if self.before and self.before != self.now else "")
            for skill, score in scores.items()
        ]
        say(self.console, f"  evaluation after step {step}: {', '.join(texts)}   [{self.time_text()}]")

    def on_warning(self, text: str) -> None:
        """Write a warning; the same text is written once."""
        if text not in self.warnings:
            say(self.console, f"  caution: {text}")
        super().on_warning(text)

    def on_alarm(self, finding: Finding) -> None:
        """Write an alarm, and what to do about it."""
        super().on_alarm(finding)
        if is_shown(finding):
            say(self.console, f"  {finding.in_a_line}\n    next step: {finding.alarm.next_step}")


def _line(first: str, cells: list[str], columns: list[StepColumn]) -> str:
    gap = " " * GAP
    aligned = [cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True)]
    return gap.join([first.rjust(STEP_WIDTH - GAP), *aligned])


OTHER_LINES = 12
"""Lines of the display besides the rows of the table and the skills."""

NEWS = 3
"""How many alarms and warnings are shown at once."""


class LiveTable(Display):
    """A live display: progress, the last steps, evaluations, warnings."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.live = Live(console=console, get_renderable=self.picture, refresh_per_second=4, transient=False)

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Show how far the work before the run is."""
        super().on_loading(what, done, total, loss)
        self.live.start()

    def on_start(self, info: RunInfo) -> None:
        """Start drawing, with the heading of the run."""
        super().on_start(info)
        self.live.start()

    def on_end(self, summary: RunSummary) -> None:
        """Draw a last time, without the skills: the summary shows them."""
        self.now = {}
        self.close()

    def close(self) -> None:
        """Stop drawing; the last table stays on the screen."""
        if self.live.is_started:
            self.live.stop()

    def picture(self) -> RenderableType:
        """The display as it is now."""
        if self.info is None:
            return self._loading()
        parts: list[RenderableType] = [
            Text("\n".join(self.heading()), style="dim", overflow="ellipsis", no_wrap=True),
            self._progress(),
            Text(""),
            self._table(),
        ]
        if self.now:
            headings = ("skill (held out)", "before", f"step {self.evaluated_at}", "change")
            parts += [Text("\n".join(["", *aligned(headings, skill_rows(self.before, self.now))]))]
        parts += [Text(text, style=style) for text, style in self._shown_lines()]
        return Group(*parts)

    def _loading(self) -> RenderableType:
        return Text("") if self.loading is None else self.loading.bar

    def _progress(self) -> RenderableType:
        assert self.info is not None
        steps = self.info.config.run.max_steps
        share = 100 * self.step / steps if steps else 100.0
        return bar(f"step {self.step}/{steps}", self.step, steps, f"{share:.0f}%  {self.time_text()}")

    def _table(self) -> Table:
        assert self.info is not None
        columns = columns_for(self.info.config, self.console.width)
        table = Table(
            box=None,
            padding=(0, GAP, 0, 0),
            pad_edge=False,
            caption=legend_for(self.info.config),
            caption_justify="left",
        )
        table.add_column("step", justify="right", min_width=STEP_WIDTH - GAP)
        for column in columns:
            table.add_column(column.title, justify="right", min_width=column.width, no_wrap=True)
        rows = list(self.rows)[-self._row_count() :]
        for step, metrics in rows:
            latest = step == rows[-1][0]
            cells = [column.cell(metrics) for column in columns]
            table.add_row(f"{'▸' if latest else ' '}{step}", *cells, style="bold" if latest else "")
        return table

    def _row_count(self) -> int:
        """Number of steps that fit on the screen: a display higher than the terminal would be cut."""
        warned = sum(1 + len(text) // self.console.width for text, _ in self._shown_lines())
        room = self.console.height - OTHER_LINES - len(self.now) - warned
        return max(1, min(ROWS, room))

    def _shown_lines(self) -> list[tuple[str, str]]:
        """The latest alarms, and the latest warnings where they leave room; each with its style."""
        alarms = [(f"! {text}", "red") for text in self.alarms[-NEWS:]]
        warnings = [(f"! {text}", "yellow") for text in self.warnings[-NEWS:]]
        return alarms + warnings[len(alarms) :]


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
