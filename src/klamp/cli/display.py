"""A run, or the runs of an ablation, as they go: single lines; a terminal that can draw has what moves below them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from klamp.ablation.executor import RunState, Update
from klamp.ablation.plan import Run
from klamp.cli.describe import describe_task
from klamp.cli.text import GAP, MISSING, duration, fixed, say, visible
from klamp.config.describe import describe_controller, describe_kl, describe_teacher
from klamp.diagnostics.doctor import Finding
from klamp.report.run import ScoreFormat
from klamp.training.config import TrainConfig
from klamp.training.observers import SAID_ELSEWHERE, Observer, RunInfo

LOADING_LINES = 5
"""Lines of slow work in a log, besides its first and its last."""


def bar(title: str, done: int, total: int, text: str) -> Table:
    """A title, a bar and a text on one line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(min_width=10, max_width=36)
    grid.add_column(no_wrap=True)
    grid.add_row(Text(title, style="bold"), ProgressBar(total=max(1, total), completed=done), Text(text))
    return grid


class Drawn(Observer):
    """Lines as they come; a terminal that can draw has a picture below them, which is drawn again as time passes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.draws = console.is_terminal and not console.is_dumb_terminal
        self.loading: Table | None = None
        self.started = self.clock()
        self.live = Live(console=console, get_renderable=self.picture, refresh_per_second=4)

    def clock(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def draw(self) -> None:
        """Begin to draw, where that can be done."""
        if self.draws:
            self.live.start()

    def close(self) -> None:
        """Stop drawing; the last picture stays on the screen."""
        self.live.stop()

    def say(self, text: str) -> None:
        """Write a line at once; a reader that has left, as that of `klamp train | head`, does not end the run."""
        with suppress(BrokenPipeError):
            if self.console.is_terminal:  # above what is drawn there
                self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
            else:
                say(text, file=self.console.file)

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Say how far the work before the first step is."""
        text = f"{done}/{total}" + ("" if loss is None else f", loss {loss:.3f}")
        due = done in (1, total) or done % max(1, total // LOADING_LINES) == 0
        self.draw()
        if due and not self.draws:
            self.say(f"{what}: {text}")
        self.loading = bar(f"{what}, once", done, total, text) if done < total else None

    def picture(self) -> RenderableType:
        """What is drawn now."""
        return Text("") if self.loading is None else self.loading

    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None: not known yet."""

    def time_text(self) -> str:
        """The time that has passed and the time left, as text."""
        left = self.seconds_left()
        passed = f"{duration(self.clock() - self.started)} elapsed"
        return passed if left is None else f"{passed}, {duration(left)} left"


STEP_WIDTH = 7
"""Width of the first column of the table of steps, with the gap after it."""


@dataclass(frozen=True, kw_only=True)
class StepColumn:
    """One column of the table."""

    title: str
    """The column's heading."""
    metric: str
    """The metric that the column shows; see `klamp.diagnostics.metrics`."""
    width: int
    """The column's width in characters."""
    write: Callable[[float], str]
    """The function that writes a value as text."""

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The metric's value as text; "-" where there is none."""
        return self.write(metrics[self.metric]) if self.metric in metrics else MISSING


COLUMNS = (
    StepColumn(title="reward", metric="reward", width=6, write=fixed(3)),
    StepColumn(title="KL k1", metric="kl/k1", width=7, write=fixed(4)),
    StepColumn(title="KL k3", metric="kl/k3", width=6, write=fixed(4)),
    StepColumn(title="exact", metric="kl/exact", width=6, write=fixed(4)),
    StepColumn(title="teacher", metric="teacher/kl", width=7, write=fixed(4)),
    StepColumn(title="over", metric="kl/over_budget", width=6, write="{:.1%}".format),
    StepColumn(title="beta", metric="beta", width=7, write="{:.3g}".format),
    StepColumn(title="length", metric="length/mean", width=6, write=fixed(1)),
    StepColumn(title="entropy", metric="policy/entropy", width=7, write=fixed(3)),
    StepColumn(title="clip", metric="policy/ratio_clipped", width=6, write="{:.1%}".format),
    StepColumn(title="lr", metric="train/learning_rate", width=7, write="{:.3g}".format),
    StepColumn(title="tok/s", metric="speed/tokens_per_second", width=6, write="{:,.0f}".format),
)
LEGEND = (
    "KL in nats per token; over: completions past the KL budget; clip: tokens past a ratio bound; "
    "tok/s: sampled and trained"
)


def columns_for(config: TrainConfig) -> list[StepColumn]:
    """The columns that a run of this configuration has."""
    empty = {"kl/over_budget"} if config.kl.kl_clip_method == "none" else set()
    empty |= set() if config.teacher.there else {"teacher/kl"}
    return [column for column in COLUMNS if column.metric not in empty]


ROWS = 12
"""The most steps that the table on a terminal shows."""
LINES = 20
"""About how many steps of a run get a line in a log."""


class Display(Drawn):
    """One run as it goes.

    Evaluations, cautions and alarms are lines. So are some twenty of the steps in a log or a pipe; a terminal has the
    last steps in a table below the lines, under a bar.
    """

    def __init__(self, console: Console) -> None:
        self.info: RunInfo | None = None
        self.columns: Sequence[StepColumn] = COLUMNS
        self.rows: deque[str] = deque(maxlen=ROWS)
        self.step = 0
        self.before: Mapping[str, float] = {}
        self.warnings: set[str] = set()
        self.raised: set[str] = set()
        super().__init__(console)

    def on_start(self, info: RunInfo) -> None:
        """Write the heading of the run; its time counts from here."""
        self.info, self.step, self.started = info, info.start_step, self.clock()
        self.columns = columns_for(info.config)
        self.say("\n".join([*heading(info), "", LEGEND]))
        self.draw()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's line; a log has it for the first step, the last, and about twenty between."""
        assert self.info is not None
        if not (self.rows or self.draws):
            self.say(self._titles())
        self.step = step
        self.rows.append(_line(str(step), [column.cell(metrics) for column in self.columns], self.columns))
        start, last = self.info.start_step, self.info.config.run.max_steps
        every = max(1, -(-(last - start) // LINES))
        if not self.draws and (step in (start + 1, last) or step % every == 0):
            self.say(self.rows[-1])

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
        self.say(f"  evaluation after step {step}: {texts}   [{self.time_text()}]")

    def on_warning(self, text: str) -> None:
        """Write a warning; the same text is written once."""
        if text not in self.warnings:
            self.warnings.add(text)
            self.say(f"  caution: {text}")

    def on_alarm(self, finding: Finding) -> None:
        """Write an alarm, and what to do about it; no notes, nor what a caution has told already."""
        self.raised.add(finding.alarm.name)
        if finding.alarm.level == "alarm" and finding.alarm.name not in SAID_ELSEWHERE:
            self.say(f"  {finding.in_a_line}\n    next step: {finding.alarm.next_step}")

    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None before the first step."""
        if self.info is None or self.step <= self.info.start_step:
            return None
        left = max(0, self.info.config.run.max_steps - self.step)
        return (self.clock() - self.started) / (self.step - self.info.start_step) * left

    def picture(self) -> RenderableType:
        """What is drawn now: a bar and the last steps; a narrow terminal cuts the columns at the right."""
        if self.info is None:
            return super().picture()
        steps = self.info.config.run.max_steps
        share = 100 * self.step / steps if steps else 100.0
        rows = list(self.rows)[-max(1, self.console.height - 4) :]
        return Group(
            bar(f"step {self.step}/{steps}", self.step, steps, f"{share:.0f}%  {self.time_text()}"),
            Text("\n".join(["", self._titles(), *rows]), no_wrap=True, overflow="ellipsis"),
        )

    def _titles(self) -> str:
        return _line("step", [column.title for column in self.columns], self.columns)


def heading(info: RunInfo) -> list[str]:
    """The heading of a run: its task, model, KL and folder in a few lines."""
    config = info.config
    some = "" if info.trainable_parameters == info.parameters else f", {_count(info.trainable_parameters)} trained"
    where = info.device
    again = f" · continued after step {info.start_step}" if info.start_step else ""
    size = f", {_count(info.parameters)} parameters{some}" if info.parameters else ""
    lines = [f"{describe_task(config)} · {config.model.model}{size} · {where}", f"KL: {describe_kl(config.kl)}"]
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


def _line(first: str, cells: list[str], columns: Sequence[StepColumn]) -> str:
    gap = " " * GAP
    aligned = [cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True)]
    return gap.join([first.rjust(STEP_WIDTH - GAP), *aligned])


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


ENDED: tuple[RunState, ...] = ("done", "failed", "kept")
KL = ("kl/reverse", "kl/exact", "kl/k3")
"""The metrics that a line's KL comes from, best first: measured at the end, exact in training, k3."""
PARTS = 4
"""Lines per run, besides one for its start and one for its end."""


@dataclass(kw_only=True)
class RunRow:
    """One run of an ablation, with all that the display shows of it."""

    run: Run
    state: RunState = "waiting"
    step: int = 0
    steps: int = 0
    first: int | None = None
    """The step at which this session started or continued the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    said: int = 0
    """The parts of its steps that have had a line."""

    @property
    def name(self) -> str:
        """Name of the run: its arm and its seed."""
        return f"{self.run.arm.name}, seed {self.run.seed}"

    def take(self, update: Update) -> None:
        """Keep what an event says about the run."""
        self.state, self.steps = update.state, update.steps or self.steps
        self.step = max(self.step, update.step)
        if update.state == "running" and self.first is None and update.metrics:
            self.first = update.step - 1
        self.metrics = update.metrics or self.metrics

    def numbers(self) -> str:
        """Where the run is, its reward, its KL by the best estimate that there is, and its length, as text."""
        kl = next((self.metrics[name] for name in KL if name in self.metrics), None)
        length = self.metrics.get("length", self.metrics.get("length/mean"))
        values = {"reward": (self.metrics.get("reward"), 3), "KL": (kl, 4), "length": (length, 1)}
        texts = [f"{name} {MISSING if v is None else fixed(digits)(v)}" for name, (v, digits) in values.items()]
        return ", ".join([f"step {self.step}/{self.steps}", *texts])


class Board(Drawn):
    """The display of an ablation: a line for what becomes of each run, with the time left."""

    def __init__(self, console: Console, every: Sequence[Run]) -> None:
        self.rows = {run.name: RunRow(run=run, steps=run.config.run.max_steps) for run in every}
        super().__init__(console)

    def tell(self, update: Update) -> None:
        """Write a line when a run starts and ends, and a few between."""
        row = self.rows[update.run]
        before = row.state
        row.take(update)
        part = PARTS * row.step // row.steps if row.steps else 0
        moved = row.state == "running" and bool(update.metrics) and part > row.said
        if row.state not in (before, "waiting") or moved:
            row.said = part
            said = {"kept": "done before", "running": "under way"}.get(row.state, row.state)
            rest = row.numbers() if row.metrics else f"{row.steps} steps"
            text = f"failed: {update.text}" if row.state == "failed" else f"{said}, {rest}"
            ended = sum(each.state in ENDED for each in self.rows.values())
            self.say(f"[{ended}/{len(self.rows)} ended, {self.time_text()}] {row.name}: {text}")

    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None before the first step."""
        rows = self.rows.values()
        taken = sum(row.step - row.first for row in rows if row.first is not None)
        left = sum(row.steps - row.step for row in rows if row.state not in ENDED)
        return (self.clock() - self.started) / taken * left if taken else None
