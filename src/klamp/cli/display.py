"""A run in words, and its progress: single lines; a terminal has a bar and a table below them."""

from __future__ import annotations

import re
import textwrap
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import accumulate

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from klamp.cli.text import MISSING, number, say, visible
from klamp.config.describe import describe_controller, describe_kl, describe_movement, describe_teacher
from klamp.doctor.examine import AlarmFinding
from klamp.doctor.metrics import COLUMNS
from klamp.lab.config import TrainConfig, reference_kind
from klamp.lab.observers import Observer, RunInfo
from klamp.lab.tasks.base import NO_REWARD
from klamp.report.run import ScoreFormat

LEGEND = (
    "KL in nats per token; over: completions past the KL budget; teacher: KL to it; clip: tokens past a ratio bound; "
    "tok/s: sampled and trained"
)
ROWS, LINES, LOADING_LINES = 12, 20, 5
"""Steps in the table of a terminal; lines for the steps of a run in a log; lines for the work before the first step."""


class Drawn(Observer):
    """Lines as they come, and on a terminal a bar below them; the last picture stays. Without a console on stdout."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.draws = self.console.is_terminal and not self.console.is_dumb_terminal
        times = TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
        self.progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
        self.bar = self.progress.add_task("", visible=False)
        self.live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=4)

    def close(self) -> None:
        self.live.stop()

    def move(self, description: str, done: int, total: int) -> None:
        self.progress.update(self.bar, description=description, completed=done, total=total, visible=True)
        if self.draws:
            self.live.start()

    def say(self, text: str) -> None:
        """Write a line at once; a reader that has left, as in `klamp train | head`, does not end the run."""
        with suppress(BrokenPipeError):
            if self.console.is_terminal:  # above what is drawn there
                self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
            else:
                say(text, file=self.console.file)

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        self.move(f"{what}, once", done, total)
        if not self.draws and (done in (1, total) or done % max(1, total // LOADING_LINES) == 0):
            self.say(f"{what}: {done}/{total}" + ("" if loss is None else f", loss {loss:.3f}"))

    def picture(self) -> RenderableType:
        return self.progress.get_renderable()


class Display(Drawn):
    """One run: evaluations, cautions, alarms and some steps are lines; a terminal has the last steps in a table."""

    info: RunInfo | None = None
    before: Mapping[str, float] = {}

    def __init__(self, console: Console | None = None) -> None:
        self.rows: deque[dict[str, str]] = deque(maxlen=ROWS)
        self.raised: set[str] = set()
        super().__init__(console)

    def on_start(self, info: RunInfo) -> None:
        """Write what the run is; the bar's time counts from here."""
        self.info = info
        self.say("\n".join([*(f"{label:<11} {text}" for label, text in heading(info).items()), ""]))
        self.progress.reset(self.bar)
        self.move("step", info.start_step, info.config.run.max_steps)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's row; a log has a line for the first step, the last, and about twenty between."""
        assert self.info is not None
        start, last = self.info.start_step, self.info.config.run.max_steps
        cells = {title: number(metrics[name]) for title, name in COLUMNS.items() if name in metrics}
        if not (self.draws or self.rows):
            self.say(legend(cells))
        self.rows.append({"step": str(step), **cells})
        self.move("step", step, last)
        if not self.draws and (step in (start + 1, last) or step % max(1, -(-(last - start) // LINES)) == 0):
            self.say(f"step {step}/{last}: {', '.join(f'{title} {cell}' for title, cell in cells.items())}")

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores in a line, with their change since the start."""
        before, self.before = self.before, self.before or scores
        scale = ScoreFormat.fitting(before, scores)
        changes = {skill: f" ({scale.change(before[skill], scores[skill])})" for skill in before.keys() & scores}
        texts = (f"{skill} {scale.write(score)}{changes.get(skill, '')}" for skill, score in scores.items())
        self.say(f"  evaluation after step {step}: {', '.join(texts)}")

    def on_warning(self, text: str) -> None:
        self.say(f"  caution: {text}")

    def on_alarm(self, finding: AlarmFinding) -> None:
        """Write an alarm and its next step; no notes."""
        self.raised.add(finding.alarm.name)
        if finding.alarm.level == "alarm":
            self.say(f"  {finding.in_a_line}\n    next step: {finding.alarm.next_step}")

    def picture(self) -> RenderableType:
        """The bar, the last steps, and what their columns mean; columns that do not fit are left out whole."""
        titles = [title for title in ("step", *COLUMNS) if any(title in row for row in self.rows)]
        lengths = [2 + max(len(title), *(len(row.get(title, MISSING)) for row in self.rows)) for title in titles]
        titles = [t for t, end in zip(titles, accumulate(lengths), strict=True) if end <= self.console.width + 2]
        lines = textwrap.wrap(legend(titles), self.console.width)
        table = Table(*(Column(title, justify="right", no_wrap=True) for title in titles), box=None, header_style="")
        table.padding, table.pad_edge = (0, 1), False
        for row in list(self.rows)[-max(1, self.console.height - 4 - len(lines)) :]:
            table.add_row(*(row.get(title, MISSING) for title in titles))
        return Group(super().picture(), table, *map(Text, lines))


def legend(titles: Collection[str]) -> str:
    """What the columns with these titles mean."""
    first = {title.partition(" ")[0] for title in titles}
    return "; ".join(part for part in LEGEND.split("; ") if re.split("[ :]", part)[0] in first)


MONITOR = "; --kl_monitor loads one, and measures the KL"
"""Follows the words about a missing reference."""


def settings(config: TrainConfig) -> dict[str, str]:
    """What a run is configured to do: label -> text."""
    kl, model, kind = config.kl, config.model, reference_kind(config)
    trained = f"a LoRA adapter of rank {model.lora_r} is trained" if model.lora_r else "all weights are trained"
    who = describe_movement(kl) if kind in ("ema", "periodic") else model.ref_model or kl.reference_url or ""
    who = f"beta is 0, so no reference is loaded{MONITOR}" if kind == "none" else who
    alone = "; reward none is the teacher alone, unless --beta is set" if config.task.reward == NO_REWARD else ""
    return {
        "task": config.task.task + (f", reward {config.task.reward}" if config.task.reward else ""),
        "model": f"{model.model}; {model.dtype}, {trained}",
        "reference": f"{kind}: {who}" if who else kind,
        "teacher": describe_teacher(config.teacher),
        "KL": describe_kl(kl),
        "beta": describe_controller(kl) if kl.needs_reference else f"0: it trains without KL to the start{alone}",
    }


def heading(info: RunInfo) -> dict[str, str]:
    """The lines above the table of a run: label -> text."""
    lines = settings(info.config)
    lines["model"] += f" ({info.trainable_parameters:,} of {info.parameters:,} parameters, on {info.device})"
    if info.start_step:
        lines["resume"] = f"after step {info.start_step}; changed: {info.changes or 'nothing'}"
    return {**lines, "folder": str(info.output_dir)}


def skill_rows(before: Mapping[str, float], after: Mapping[str, float], trained: str = "") -> list[tuple[str, ...]]:
    """Every skill with its score before, its score after and the change, as text; the trained one first."""
    scores, rows = ScoreFormat.fitting(before, after), list[tuple[str, ...]]()
    for skill in sorted({**before, **after}, key=lambda name: name != trained):
        was, now = before.get(skill), after.get(skill)
        name = f"{skill} (trained)" if skill == trained else skill
        rows.append((name, scores.write(was), scores.write(now), scores.change(was, now)))
    return rows
