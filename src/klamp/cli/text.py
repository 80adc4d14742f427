"""What a person reads in a terminal: numbers, tables, paragraphs, errors and cautions; and the exit codes."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from klamp.errors import ConfigError, DataError, KlampError, KLWarning

FAILED, WRONG_CONFIGURATION, CANNOT_TELL, INTERRUPTED = 1, 2, 3, 130
MISSING = "-"
WIDTH = 100
"""Columns of a paragraph."""
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would obey instead of showing it, or would show in another order, but for tabs and line ends."""


def visible(text: str) -> str:
    """A text with what a terminal would obey written out: names and cautions in a record may hold anything."""
    return OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: object = "", *, file: IO[str] | None = None) -> None:
    """Print a text and a line end (None: to stdout): all that klamp writes goes through here, or through rich."""
    print(visible(str(text)), file=file, flush=True)


def number(value: float) -> str:
    """A number as text, with four digits; large ones whole, with commas."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def train_command(*words: str, **values: Any) -> str:
    """A command of `klamp train`: words, and flags with their values."""
    flags = list[object]()
    for name, value in values.items():
        single = () if isinstance(value, bool) else (value,)
        flags += [f"--{'no_' * (value is False)}{name}", *(value if isinstance(value, tuple) else single)]
    return shlex.join(["klamp", "train", *words, *map(str, flags)])


def duration(seconds: float) -> str:
    """Seconds as text on a clock: 1:02 or 3:04:05."""
    minutes, left = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts under its title; if all headings are empty, it has no head."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    head, *body = ([Text(visible(cell).replace("\n", "\\n")) for cell in line] for line in (headings, *rows))
    table = Table(*map(Column, head), box=None, show_header=any(headings), padding=(0, 0, 0, 2), header_style="")
    for cells in body:
        table.add_row(*cells)
    console = Console(width=None if sys.stdout.isatty() else 10_000)  # a file has room
    with console.capture() as capture:
        console.print(table)
    say("\n".join((title, *(line.rstrip() for line in capture.get().splitlines()))))


def show_paragraph(text: str, *, label: str = "", width: int = 12) -> None:
    """Print a text, wrapped and indented; a label stands before it in a column of its own."""
    start = f"  {label:<{width}} " if label or width else "  "
    rest = " " * len(start)
    say(textwrap.fill(visible(text), WIDTH, initial_indent=start, subsequent_indent=rest, break_on_hyphens=False))


def exit_code(error: KlampError) -> int:
    """The exit code of an error: 2 for a wrong configuration, 130 after Ctrl-C, 1 for all others."""
    if isinstance(error, ConfigError):
        return WRONG_CONFIGURATION
    return INTERRUPTED if getattr(error, "interrupted", False) else FAILED


def of_the_system(error: OSError | SystemExit) -> DataError:
    """The error for a file or connection that the system did not let klamp use, or for code that ended the program."""
    if isinstance(error, SystemExit):
        what, got = "the code that klamp called ended the program", f"sys.exit({error.code!r})"
        return DataError(what, got=got, why="only klamp ends a run", fix="--debug shows where")
    why, fix = error.strerror or f"{type(error).__name__}: {error}", "check that path; --debug shows where it was used"
    return DataError("the operating system refused a request of klamp", got=error.filename, why=why, fix=fix)


def show_error(error: KlampError) -> None:
    """Print to stderr why a command ended, with its notes."""
    notes = " ".join(note.strip() for note in getattr(error, "__notes__", ()))
    kind = "stopped" if exit_code(error) == INTERRUPTED else "error"
    say(f"klamp: {kind}: {error}" + (f"\n  note: {notes}" if notes else ""), file=sys.stderr)


def show_caution(text: str) -> None:
    """Print to stderr what the user should know although the run goes on."""
    say(f"klamp: caution: {text}", file=sys.stderr)


@contextmanager
def cautions_shown() -> Iterator[None]:
    """Within this context, KLWarnings are printed as cautions, each text once; other warnings are unchanged."""
    usual, once = warnings.showwarning, functools.cache(show_caution)

    def show(message: Warning | str, category: type[Warning], *where: Any, **named: Any) -> None:
        if issubclass(category, KLWarning):
            once(str(message))
        else:
            usual(message, category, *where, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("always", KLWarning)
        warnings.showwarning = show
        yield
