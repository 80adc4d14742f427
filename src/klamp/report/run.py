"""A run as the report gets it: plain data, from whichever reader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from klamp.diagnostics.doctor import Diagnosis
from klamp.diagnostics.history import History


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """A run as the report shows it: its diagnosed history, its configuration, its versions."""

    name: str
    """A short name, different from those of the other runs."""
    path: str
    """The path of its record."""
    group: str = ""
    """Runs of one group look alike in charts, as seeds of one configuration do; empty: it looks like no other."""
    diagnosis: Diagnosis
    """Its history, and what the alarms found in it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration; empty where the record does not hold it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the fields that have one; empty where they are not known."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Name of a package -> its version."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Skill -> score before training; empty: the first evaluation."""
    after: Mapping[str, float] = field(default_factory=dict)
    """The same after training; empty: the last evaluation."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Name -> value, measured once after training on held-out prompts; empty: nobody measured."""

    @property
    def history(self) -> History:
        """The record of the run."""
        return self.diagnosis.history

    @property
    def levels(self) -> tuple[int, int]:
        """The number of alarms and the number of notes that rose."""
        alarms = sum(finding.alarm.level == "alarm" for finding in self.diagnosis.findings)
        return alarms, len(self.diagnosis.findings) - alarms

    @property
    def is_measured(self) -> bool:
        """Whether its KL was measured after training, whatever its steps logged."""
        return "kl/reverse" in self.measured

    def curve(self, name: str) -> dict[float, float]:
        """The values of a metric, or of `eval/SKILL`: step -> value."""
        if name.startswith("eval/"):
            skill = name.removeprefix("eval/")
            rows = self.history.evaluations
            return {row.step: row.metrics[skill] for row in rows if skill in row.metrics}
        return {row.step: row.metrics[name] for row in self.history.rows if name in row.metrics}

    def tokens(self) -> dict[float, float]:
        """Tokens sampled by the end of a step, from the logged lengths: step -> tokens; empty: unknown."""
        prompts, completions = (self.config.get(name) for name in ("prompts_per_step", "num_generations"))
        lengths = self.curve("length/mean")
        if not (lengths and isinstance(prompts, int) and isinstance(completions, int) and prompts * completions > 0):
            return {}
        found, last = {0.0: 0.0}, 0.0
        for step, length in lengths.items():
            if step > last and math.isfinite(length):
                found[step] = found[last] + (step - last) * length * prompts * completions
                last = step
        return found


def slots_of(runs: Sequence[ReportRun]) -> list[int]:
    """The number of each run's colour; runs of one group share it."""
    names = [run.group or f"run {number}" for number, run in enumerate(runs)]
    return [list(dict.fromkeys(names)).index(name) for name in names]


def skills_of(runs: Sequence[ReportRun]) -> list[str]:
    """The skills that were evaluated: those that are trained first, the others by name."""
    found = {name for run in runs for name in (*run.before, *run.after)}
    found |= {name for run in runs for row in run.history.evaluations for name in row.metrics}
    trained = {run.history.settings.rl_skill for run in runs}
    return sorted(found, key=lambda name: (name not in trained, name))
