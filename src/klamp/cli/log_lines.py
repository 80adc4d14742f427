"""The run where there is no terminal: a heading, then one line now and then, each written at once."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from klamp.cli.columns import GAP, STEP_WIDTH, Column, Scale, columns_for, legend_for
from klamp.cli.display import Watch, is_shown
from klamp.diagnostics.doctor import Finding
from klamp.training.observers import RunInfo

LINES = 20
"""Lines of steps in a run, about."""
LOADING_LINES = 5
WIDTH = 120
"""A file has no width: all columns are written."""


class PlainLines(Watch):
    """A display for logs and pipes."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.columns: list[Column] = []
        self.readers_left = True

    def on_loading(self, what: str, done: int, total: int, loss: float) -> None:
        """A line at the beginning, now and then, and at the end."""
        super().on_loading(what, done, total, loss)
        every = max(1, total // LOADING_LINES)
        if done in (1, total) or done % every == 0:
            self._say(f"{what}: {done}/{total}, loss {loss:.3f}")

    def on_start(self, info: RunInfo) -> None:
        """The run in words."""
        super().on_start(info)
        self.columns = columns_for(info.config, WIDTH)
        self._say("\n".join(self.heading()))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A line for the first step, the last, and about twenty between; the first under the table's head."""
        assert self.info is not None
        if not self.rows:
            titles = [column.title for column in self.columns]
            self._say(f"\n{legend_for(self.info.config)}\n{_line('step', titles, self.columns)}")
        super().on_step(step, metrics)
        start, last = self.info.start_step, self.info.config.run.max_steps
        every = max(1, -(-(last - start) // LINES))
        if step in (start + 1, last) or step % every == 0:
            self._say(_line(str(step), [column.cell(metrics) for column in self.columns], self.columns))

    def on_evaluation(self, step: int, scores: Mapping[str, float]) -> None:
        """The scores in a line, with their change since the start."""
        super().on_evaluation(step, scores)
        scale = Scale.of(self.before, self.now)
        changes = {skill: scale.change(self.before.get(skill), score) for skill, score in scores.items()}
        texts = [
            f"{skill} {scale.write(score)}"
            + (f" ({changes[skill]})" if self.before and self.before != self.now else "")
            for skill, score in scores.items()
        ]
        self._say(f"  evaluation after step {step}: {', '.join(texts)}   [{self.time_text()}]")

    def on_warning(self, text: str) -> None:
        """The warning, once."""
        if text not in self.warnings:
            self._say(f"  caution: {text}")
        super().on_warning(text)

    def on_alarm(self, finding: Finding) -> None:
        """The alarm, and what to do."""
        super().on_alarm(finding)
        if is_shown(finding):
            self._say(f"  {finding.in_a_line}\n    next step: {finding.alarm.next_step}")

    def _say(self, text: str) -> None:
        if self.readers_left:
            try:
                print(text, file=self.console.file, flush=True)
            except BrokenPipeError:  # `klamp train | head`: the run goes on
                self.readers_left = False


def _line(first: str, cells: list[str], columns: list[Column]) -> str:
    gap = " " * GAP
    aligned = [cell.rjust(column.width) for cell, column in zip(cells, columns, strict=True)]
    return gap.join([first.rjust(STEP_WIDTH - GAP), *aligned])
