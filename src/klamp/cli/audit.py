"""`klamp audit NAME`: what the KL of an installed trainer, or of any function, really does; one table.

It runs where the trainer is installed, and asks for nothing beyond klamp's base dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from klamp.audit import load_subject
from klamp.audit.examine import Audit, audit
from klamp.cli.audit_table import HEADINGS, LEGEND, row, sentences
from klamp.cli.errors import show_caution
from klamp.cli.flags import read_options
from klamp.cli.options import AuditOptions
from klamp.cli.tables import show_table

GOOD, BAD = ("unbiased", "reverse", "±30"), ("zero", "neither", "-reverse", "-forward", "raises", "everywhere")


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp audit` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `audit`: names of hosts, or `module:function`.
        stream: where the tables go; None: stdout.

    Raises:
        KlampError: a host that is not there, a function that cannot be had; the caller shows it.
    """
    out: TextIO = stream or sys.stdout
    for name in read_options(AuditOptions, argv, command="klamp audit").names:
        subject = load_subject(name)
        for caution in subject.cautions:
            show_caution(caution)
        show_audit(audit(subject), out)
    print(LEGEND, file=out, flush=True)
    return 0


def show_audit(result: Audit, stream: TextIO) -> None:
    """Print an audit: in colour on a terminal, as aligned text elsewhere."""
    rows = [row(finding) for finding in result.findings]
    styles = {cell: _style(cell) for _, *cells in rows for cell in cells}
    show_table(stream, result.subject.title, HEADINGS, rows, styles=styles)
    for sentence in (*(s for finding in result.findings for s in sentences(finding)), *result.subject.notes):
        print(f"- {sentence}", file=stream)
    if result.reductions:
        show_table(stream, "How the KL of a batch is averaged:", ("", ""), list(result.reductions.items()))
    print(file=stream)


def _style(cell: str) -> str:
    if cell in GOOD:
        return "green"
    return "red" if cell.startswith(BAD) else ""
