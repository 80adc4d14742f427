"""Counts the benches that did not run because a trainer is not installed."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line with their number; `-ra` lists them."""
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("NOT RUN" in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"NOT RUN: {count} tests of klamp.check need a package that is not installed")
