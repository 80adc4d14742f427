"""The runs of an ablation as they go: a line now and then for each; on a terminal a bar stays below them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.live import Live
from rich.table import Table

from klamp.ablation.executor import RunState, Update
from klamp.ablation.plan import Run
from klamp.cli.display import Loading, bar, say
from klamp.cli.text import MISSING, duration, fixed

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


class Board:
    """The display of an ablation: all its runs, and the time left."""

    def __init__(self, console: Console, every: Sequence[Run]) -> None:
        self.console = console
        self.rows = {run.name: RunRow(run=run, steps=run.config.run.max_steps) for run in every}
        self.made: Loading | None = None
        self.started = self.clock()
        self.live = Live(console=console, get_renderable=self.picture, refresh_per_second=4)
        if console.is_terminal and not console.is_dumb_terminal:
            self.live.start()

    def clock(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Show how far a model is that has to be made before the runs."""
        self.made = Loading(what, done, total, loss)
        if self.made.is_due and not self.live.is_started:
            say(self.console, self.made.line)
        self.made = self.made if done < total else None

    def tell(self, update: Update) -> None:
        """Write a line when a run starts and ends, a few between, and one for every alarm."""
        row = self.rows[update.run]
        before = row.state
        if before == "stopping" and update.state in ("running", "measuring"):
            update = replace(update, state="stopping")  # what it told before it heard of that
        row.take(update)
        part = PARTS * row.step // row.steps if row.steps else 0
        moved = row.state == "running" and bool(update.metrics) and part > row.said
        if (row.state != before and row.state not in ("waiting", "measuring")) or moved:
            row.said = part
            said = {"kept": "done before", "running": "under way"}.get(row.state, row.state)
            rest = row.numbers() if row.metrics else f"{row.steps} steps"
            text = f"failed: {update.text}" if row.state == "failed" else f"{said}, {rest}"
            say(self.console, f"[{self.ended()}/{len(self.rows)} ended, {self.time_text()}] {row.name}: {text}")
        if update.text and update.state != "failed":
            say(self.console, f"  alarm in {row.name}: {update.text}")

    def close(self) -> None:
        """Stop drawing."""
        self.live.stop()

    def picture(self) -> Table:
        """The bar as it is now."""
        if self.made is not None:
            return self.made.bar
        found = Counter("done before" if row.state == "kept" else row.state for row in self.rows.values())
        steps = sum(row.steps for row in self.rows.values())
        done = sum(row.steps if row.state in ENDED else row.step for row in self.rows.values())
        share = f"{100 * done / max(1, steps):.0f}%  {self.time_text()}"
        return bar(", ".join(f"{count} {state}" for state, count in found.items()), done, steps, share)

    def ended(self) -> int:
        """The number of runs that have ended."""
        return sum(row.state in ENDED for row in self.rows.values())

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
