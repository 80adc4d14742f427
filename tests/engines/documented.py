"""The tables in docs/audit.md are what the command prints, line for line."""

from __future__ import annotations

import io
from pathlib import Path

from klamp.cli.audit import LEGEND, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "audit.md"


def assert_documented(*names: str) -> None:
    """The page holds the output of `klamp audit NAME ...`, and the legend."""
    out = io.StringIO()
    assert run(names, stream=out) == 0
    page = PAGE.read_text(encoding="utf-8")
    assert out.getvalue().removesuffix(f"{LEGEND}\n").rstrip() in page
    assert LEGEND in page
