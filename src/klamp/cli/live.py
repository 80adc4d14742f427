"""The display of a run on a terminal: one table, drawn anew a few times a second."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from klamp.cli.columns import GAP, STEP_WIDTH, Scale, columns_for, legend_for, sparkline
from klamp.cli.display import ROWS, Display
from klamp.cli.loading import bar
from klamp.training.observers import RunInfo, RunSummary

OTHER_LINES = 15
"""Lines of the display besides the rows of the table and the skills."""

NEWS = 3
"""How many alarms and warnings are shown at once."""


class LiveTable(Display):
    """A live display: progress, the last steps, the course so far, evaluations, warnings."""

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
        parts += self._course()
        if self.now:
            parts += [Text(""), self._skills()]
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

    def _course(self) -> list[RenderableType]:
        """Reward and KL since the first step, as curves."""
        width = max(10, self.console.width - 40)
        lines: list[RenderableType] = []
        for name, values in self.curves():
            if len(values) > 1:
                text = f"{name:<8} {sparkline(values, width)}  {values[0]:.4g} → {values[-1]:.4g}"
                lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
        return [Text(""), *lines] if lines else []

    def _skills(self) -> Table:
        scale = Scale.of(self.before, self.now)
        return skills_table(
            self.before, self.now, scale=scale, after_title=f"step {self.evaluated_at}" if self.evaluated_at else "now"
        )


def skills_table(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    scale: Scale,
    after_title: str,
    trained: str = "",
) -> Table:
    """Scores of every skill before and after, the trained one first.

    Args:
        before: skill -> score at the start.
        after: skill -> score now.
        scale: how scores are written.
        after_title: heading of the scores now.
        trained: the skill that RL trains, if known.
    """
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column("skill (held out)", min_width=16)
    for title in ("before", after_title, "points" if scale.points else "change"):
        table.add_column(title, justify="right", min_width=7)
    for skill in sorted({**before, **after}, key=lambda name: name != trained):
        old, new = before.get(skill), after.get(skill)
        name = f"{skill} (trained)" if skill == trained else skill
        table.add_row(name, scale.write(old), scale.write(new), scale.change(old, new))
    return table
