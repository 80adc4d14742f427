"""Slow work before a run's first step (a model is taught or converted), in words and as a bar."""

from __future__ import annotations

from dataclasses import dataclass

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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
