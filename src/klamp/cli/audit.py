"""`klamp audit NAME`: what the KL of an installed trainer, or of any function, really does; one table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console

from klamp.adapters.audit import HOSTS, load_subject
from klamp.adapters.audit.function import CONTRACT
from klamp.cli.audit_table import HEADINGS, LEGEND, Row, row, sentences
from klamp.cli.problems import show_caution
from klamp.errors import unknown_name
from klamp.verify.audit import Audit, audit

GAP = 2
GOOD, BAD = ("unbiased", "reverse", "±30"), ("zero", "-reverse", "-forward", "raises")


def run(argv: Sequence[str], *, console: Console | None = None) -> int:
    """Run `klamp audit` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `audit`: names of hosts, or `module:function`.
        console: where the tables go; None: stdout.

    Raises:
        KlampError: a host that is not there, a function that cannot be had; the caller shows it.
    """
    console = console or Console(highlight=False)
    if not argv or "-h" in argv or "--help" in argv:
        console.out(help_text(), highlight=False)
        return 0
    for name in argv:
        if name.startswith("-"):
            raise unknown_name("flag", name, ["--help", "--debug"])
        subject = load_subject(name)
        for caution in subject.cautions:
            show_caution(caution)
        show_audit(console, audit(subject))
    return 0


def help_text() -> str:
    """How to call it, and what there is to audit on this machine."""
    hosts = "\n".join(f"  {name:<16} {host.what} ({_installed(host.package)})" for name, host in HOSTS.items())
    return (
        "usage: klamp audit NAME [NAME ...]\n\n"
        "Runs the KL of what is installed here through the enumeration oracle: the bias of its value, the divergence\n"
        "whose gradient it follows, where that gradient stops, how far out it is right in each floating-point type.\n\n"
        f"names:\n{hosts}\n  module:function  {CONTRACT}\n"
    )


def show_audit(console: Console, result: Audit) -> None:
    """Print an audit: in colour on a terminal, as aligned text elsewhere."""
    console.out(result.subject.title, highlight=False)
    rows = [row(finding) for finding in result.findings]
    if console.is_terminal and not console.is_dumb_terminal:
        _print_table(console, rows)
    else:
        console.out("\n".join(_lines([HEADINGS, *rows])), highlight=False)
    console.out(f"\n{LEGEND}", highlight=False)
    for sentence in (*(s for finding in result.findings for s in sentences(finding)), *result.subject.notes):
        console.out(f"- {sentence}", highlight=False)
    if result.reductions:
        console.out("\nHow the KL of a batch is averaged:", highlight=False)
        console.out("\n".join(_lines([(f"  {option}", how) for option, how in result.reductions.items()])), highlight=False)
    console.out("", highlight=False)


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = " " * GAP
    return [gap.join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in rows]


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading)
    for term, *cells in rows:
        table.add_row(term, *(Text(cell, style=_style(cell)) for cell in cells))
    console.print(table)


def _style(cell: str) -> str:
    if cell in GOOD:
        return "green"
    return "red" if cell.startswith(BAD) else ""


def _installed(package: str) -> str:
    try:
        return f"{version(package)} is installed"
    except PackageNotFoundError:
        return "not installed here"
