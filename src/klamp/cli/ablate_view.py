"""The runs of an ablation as they go: one line each on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from klamp.ablation.executor import RunState, Update
from klamp.ablation.plan import Run
from klamp.cli.columns import GAP, MISSING, duration, fixed, sparkline
from klamp.cli.display import Loading

ENDED: tuple[RunState, ...] = ("done", "failed", "kept")
AT_WORK: tuple[RunState, ...] = ("running", "measuring", "stopping")
STYLES: Mapping[RunState, str] = {"failed": "red", "waiting": "dim", "kept": "dim", "stopping": "yellow"}
KL = ("kl/reverse", "kl/exact", "kl/k3")
"""The metrics that a line's KL comes from, best first: measured at the end, exact in training, k3."""
OTHER_LINES = 8
"""Lines of the display besides those of the runs."""
PARTS = 4
"""Lines per run in a log (no terminal), besides one for its start and one for its end."""
LEGEND = "KL: to the reference in training, to the starting model once done; nats per token"


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
    rewards: list[float] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        """Name of the run: its arm and its seed."""
        return f"{self.run.arm.name}, seed {self.run.seed}"

    def take(self, update: Update) -> None:
        """Keep what an event says about the run."""
        if self.state == "stopping" and update.state in ("running", "measuring"):
            update = Update(**{**vars(update), "state": "stopping"})  # what it told before it heard of that
        self.state, self.steps = update.state, update.steps or self.steps
        self.step = max(self.step, update.step)
        if update.state == "running" and self.first is None and update.metrics:
            self.first = update.step - 1
        self.metrics = update.metrics or self.metrics
        if update.state == "running" and "reward" in update.metrics:
            self.rewards.append(update.metrics["reward"])
        if update.text and update.state == "failed":
            self.error = update.text
        elif update.text:
            self.alarms.append(update.text)

    def kl(self) -> float | None:
        """The run's KL in nats per token, by the best estimate that there is."""
        return next((self.metrics[name] for name in KL if name in self.metrics), None)

    def cells(self) -> tuple[str, str, str]:
        """The cells of the run's line: reward, KL and length, as text."""
        length = self.metrics.get("length", self.metrics.get("length/mean"))
        values = ((self.metrics.get("reward"), 3), (self.kl(), 4), (length, 1))
        reward, kl, tokens = (MISSING if v is None else fixed(digits)(v) for v, digits in values)
        return reward, kl, tokens


class Board:
    """The base of both displays of an ablation: all its runs, and the time left."""

    def __init__(self, console: Console, every: Sequence[Run]) -> None:
        self.console = console
        self.rows = {run.name: RunRow(run=run, steps=run.config.run.max_steps) for run in every}
        self.started = self.clock()

    def clock(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Take in how far a model is that has to be made before the runs."""

    def tell(self, update: Update) -> None:
        """Take in an event of a run: a step, an alarm, its end."""
        self.rows[update.run].take(update)

    def close(self) -> None:
        """Stop drawing."""

    def counts(self) -> str:
        """How many runs are done, at work, waiting or failed, in words."""
        found = Counter("done before" if row.state == "kept" else row.state for row in self.rows.values())
        return ", ".join(f"{count} {state}" for state, count in found.items())

    def share(self) -> float:
        """Steps done / steps of all runs, in [0, 1]."""
        rows = self.rows.values()
        done = sum(row.steps if row.state in ENDED else row.step for row in rows)
        return done / max(1, sum(row.steps for row in rows))

    def seconds_left(self) -> float | None:
        """Seconds left at the speed so far; None before the first step."""
        rows = self.rows.values()
        taken = sum(row.step - row.first for row in rows if row.first is not None)
        left = sum(row.steps - row.step for row in rows if row.state not in ENDED)
        return (self.clock() - self.started) / taken * left if taken else None

    def time_text(self) -> str:
        """The time that has passed and the time left, as text."""
        left = self.seconds_left()
        after = "" if left is None else f", about {duration(left)} left"
        return f"{duration(self.clock() - self.started)} elapsed{after}"


class LiveBoard(Board):
    """The display on a terminal: one table, drawn anew a few times a second."""

    def __init__(self, console: Console, every: Sequence[Run]) -> None:
        super().__init__(console, every)
        self.made: Loading | None = None
        self.live = Live(console=console, get_renderable=self.picture, refresh_per_second=4, transient=False)

    def loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Show how far the model is."""
        self.made = Loading(what, done, total, loss) if done < total else None
        self._draw()

    def tell(self, update: Update) -> None:
        """Show an event of a run."""
        super().tell(update)
        self._draw()

    def close(self) -> None:
        """Stop drawing; the last table stays on the screen."""
        if self.live.is_started:
            self.live.stop()

    def _draw(self) -> None:
        if not self.live.is_started:
            self.live.start()

    def picture(self) -> RenderableType:
        """The display as it is now."""
        if self.made is not None:
            return self.made.bar
        grid = Table.grid(padding=(0, 2))
        share = self.share()
        grid.add_row(
            Text(self.counts(), style="bold"),
            ProgressBar(total=1.0, completed=share, width=24),
            Text(f"{100 * share:.0f}%  {self.time_text()}"),
        )
        alarms = [f"! {row.name}: {text}" for row in self.rows.values() for text in row.alarms[-1:]][-2:]
        rest = len(self.rows) - len(self._shown())
        legend = Text(LEGEND + (f"; {rest} more runs are not shown" if rest else ""), style="dim")
        news = [Text(text, style="red", no_wrap=True, overflow="ellipsis") for text in alarms]
        return Group(grid, Text(""), self._table(), legend, *news)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        table.add_column("arm", no_wrap=True, overflow="ellipsis", max_width=max(16, self.console.width - 70))
        for title in ("seed", "state", "step", "reward", "KL", "length"):
            table.add_column(title, justify="left" if title == "state" else "right", no_wrap=True)
        table.add_column("reward so far", no_wrap=True, overflow="ellipsis")
        for row in self._shown():
            steps = f"{row.step}/{row.steps}"
            last = row.error or sparkline(row.rewards, 12) + ("  !" if row.alarms else "")
            cells = (row.run.arm.name, str(row.run.seed), row.state, steps, *row.cells(), last)
            table.add_row(*(Text(cell) for cell in cells), style=STYLES.get(row.state, ""))
        return table

    def _shown(self) -> list[RunRow]:
        """The runs that fit on the screen, in the order of the plan; running and failed ones go first."""
        room = max(3, self.console.height - OTHER_LINES)
        order = {**dict.fromkeys(AT_WORK, 0), "failed": 1, "waiting": 2, "done": 3, "kept": 4}
        rows = list(self.rows.values())
        chosen = sorted(range(len(rows)), key=lambda i: (order[rows[i].state], i))[:room]
        return [rows[i] for i in sorted(chosen)]


class PlainBoard(Board):
    """The display for logs and pipes: single lines, no drawing."""

    def __init__(self, console: Console, every: Sequence[Run]) -> None:
        super().__init__(console, every)
        self.said: dict[str, int] = {}
        self.readers_left = True

    def loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Write how far the model is: a line at its start, some between, one at its end."""
        work = Loading(what, done, total, loss)
        if work.is_due:
            self._say(work.line)

    def tell(self, update: Update) -> None:
        """Write a line when a run starts and ends, a few between, and one for every alarm."""
        row = self.rows[update.run]
        before, alarms = row.state, len(row.alarms)
        super().tell(update)
        part = PARTS * row.step // row.steps if row.steps else 0
        moved = row.state == "running" and bool(update.metrics) and part > self.said.get(update.run, 0)
        if (row.state != before and row.state not in ("waiting", "measuring")) or moved:
            self.said[update.run] = part
            self._say(self._line(row))
        for text in row.alarms[alarms:]:
            self._say(f"  alarm in {row.name}: {text}")

    def _line(self, row: RunRow) -> str:
        ended = sum(each.state in ENDED for each in self.rows.values())
        head = f"[{ended}/{len(self.rows)} ended, {self.time_text()}] {row.name}: "
        if row.state == "failed":
            return f"{head}failed: {row.error}"
        said = {"kept": "done before", "running": "under way"}.get(row.state, row.state)
        if not row.metrics:
            return f"{head}{said}, {row.steps} steps"
        reward, kl, length = row.cells()
        return f"{head}{said}, step {row.step}/{row.steps}, reward {reward}, KL {kl}, length {length}"

    def _say(self, text: str) -> None:
        if self.readers_left:
            try:
                print(text, file=self.console.file, flush=True)
            except BrokenPipeError:  # `klamp ablate | head`: the runs go on
                self.readers_left = False


def board_for(console: Console, every: Sequence[Run]) -> Board:
    """The display that the console allows.

    Args:
        console: where the runs are shown.
        every: the runs of the plan.
    """
    drawn = console.is_terminal and not console.is_dumb_terminal
    return (LiveBoard if drawn else PlainBoard)(console, every)
