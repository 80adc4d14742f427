"""The display of a run without a terminal: a heading, then some lines, each written at once."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from klamp.cli.columns import GAP, STEP_WIDTH, Column, Scale, columns_for, legend_for
from klamp.cli.display import Display, is_shown
from klamp.diagnostics.doctor import Finding
from klamp.training.observers import RunInfo

LINES = 20
"""About how many steps of a run get a line."""
WIDTH = 120
"""Width of a line in characters; a file has none, so that all columns fit."""


class LogLines(Display):
    """The display of a run for logs and pipes: single lines, no drawing."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.columns: list[Column] = []
        self.readers_left = True

    def on_loading(self, what: str, done: int, total: int, loss: float | None) -> None:
        """Write how far the work before the run is: a line at its start, some between, one at its end."""
        super().on_loading(what, done, total, loss)
        if self.loading is not None and self.loading.is_due:
            self._say(self.loading.line)

    def on_start(self, info: RunInfo) -> None:
        """Write the heading of the run."""
        super().on_start(info)
        self.columns = columns_for(info.config, WIDTH)
        self._say("\n".join(self.heading()))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line for the first step, the last, and about twenty between; titles stand above the first."""
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
        """Write the scores in a line, with their change since the start."""
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
        """Write a warning; the same text is written once."""
        if text not in self.warnings:
            self._say(f"  caution: {text}")
        super().on_warning(text)

    def on_alarm(self, finding: Finding) -> None:
        """Write an alarm, and what to do about it."""
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
