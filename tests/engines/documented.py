"""The tables in docs/records/index.md are what the command prints, line for line."""

import contextlib
import io
from pathlib import Path

from klamp.cli.audit import LEGEND, run

DOCS = Path(__file__).resolve().parents[2] / "docs"


def assert_documented(*names: str) -> None:
    """The record holds the output of `klamp audit NAME ...`, and the page its legend."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(names) in (0, 1)  # 1: some option follows something other than its name says
    shown = out.getvalue().removeprefix("[INFO] Running in WANDB offline mode\n")  # wandb's own, at TRL's first trainer
    page, record = ((DOCS / name).read_text(encoding="utf-8") for name in ("audit.md", "records/index.md"))
    assert shown.removesuffix(f"{LEGEND}\n").rstrip() in record
    assert LEGEND in page
