"""`klamp audit NAME`: what the KL of an installed trainer, or of any function, really does; one table.

It runs where the trainer is installed, so it asks for no library of its own: without rich the table is plain text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TextIO

from klamp.audit import HOSTS, load_subject
from klamp.audit.function import CONTRACT
from klamp.cli.audit_table import HEADINGS, LEGEND, Row, row, sentences
from klamp.cli.errors import show_caution
from klamp.errors import unknown_name
from klamp.verify.audit import Audit, audit

GAP = "  "
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
    if not argv or "-h" in argv or "--help" in argv:
        print(help_text(), file=out)
        return 0
    for name in argv:
        if name.startswith("-"):
            raise unknown_name("flag", name, ["--help", "--debug"])
    for name in argv:
        subject = load_subject(name)
        for caution in subject.cautions:
            show_caution(caution)
        show_audit(audit(subject), out)
    print(LEGEND, file=out, flush=True)
    return 0


def help_text() -> str:
    """How to call it, and what there is to audit on this machine."""
    hosts = "\n".join(f"  {name:<16} {host.what} ({_installed(host.package)})" for name, host in HOSTS.items())
    return (
        "usage: klamp audit NAME [NAME ...]\n\n"
        "Runs the KL of what is installed here through the enumeration oracle: the bias of its value, the divergence\n"
        "whose gradient it follows, where that gradient stops, how far out it is right in each floating-point type.\n\n"
        f"names:\n{hosts}\n  module:function  {CONTRACT}"
    )


def show_audit(result: Audit, stream: TextIO) -> None:
    """Print an audit: in colour on a terminal, as aligned text elsewhere."""
    print(result.subject.title, file=stream)
    rows = [row(finding) for finding in result.findings]
    if stream.isatty() and find_spec("rich"):
        _print_table(rows, stream)
    else:
        print("\n".join(_lines([HEADINGS, *rows])), file=stream)
    for sentence in (*(s for finding in result.findings for s in sentences(finding)), *result.subject.notes):
        print(f"- {sentence}", file=stream)
    if result.reductions:
        print("How the KL of a batch is averaged:", file=stream)
        print("\n".join(_lines([(f"  {option}", how) for option, how in result.reductions.items()])), file=stream)
    print(file=stream)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [GAP.join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in rows]


def _print_table(rows: Sequence[Row], stream: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading)
    for term, *cells in rows:
        table.add_row(Text(term), *(Text(cell, style=_style(cell)) for cell in cells))
    Console(file=stream, highlight=False).print(table)


def _style(cell: str) -> str:
    if cell in GOOD:
        return "green"
    return "red" if cell.startswith(BAD) else ""


def _installed(package: str) -> str:
    try:
        return f"{version(package)} is installed"
    except PackageNotFoundError:
        return "not installed here"
