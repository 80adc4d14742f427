"""The section of settings: the configuration of each run, what a resume changed, and the versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from klamp.report.run import ReportRun
from klamp.report.text import MISSING, Html, element, join, plain_table, setting, shorten

LONGEST = 200
"""Characters of a value that are shown."""


def settings_section(runs: Sequence[ReportRun]) -> Html:
    """Every field of the configurations, the changes at a resume, and the software versions."""
    changes = [f"{run.name}, after step {step}: {text}" for run in runs for step, text in run.history.changes.items()]
    return join(
        [
            _table("field", "value", [(run.name, run.config) for run in runs], lacks="configuration"),
            *([element("h3", "Changed at a resume")] if changes else []),
            *(element("p", text) for text in changes),
            element("h3", "Versions", id="versions"),
            _table("package", "version", [(run.name, run.versions) for run in runs], lacks="versions"),
        ]
    )


def _table(name: str, value: str, columns: Sequence[tuple[str, Mapping[str, Any]]], *, lacks: str) -> Html:
    """One row per name, one column per run."""
    names = list(dict.fromkeys(name for _, values in columns for name in values))
    if not names:
        return element("p", f"The record does not hold the {lacks}.", class_="missing")
    headings = (name, *(run if len(columns) > 1 else value for run, _ in columns))
    rows = [(element("code", each), *(_value(values, each) for _, values in columns)) for each in names]
    return plain_table(headings, rows, caption=lacks, classes="settings")


def _value(values: Mapping[str, Any], name: str) -> str:
    return shorten(setting(values[name]), LONGEST) if name in values else MISSING
