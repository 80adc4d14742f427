"""What a person reads in a terminal: numbers, tables, paragraphs, errors and cautions each once; and the exit codes."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from klamp.errors import (
    ConfigError,
    DataError,
    KlampError,
    KLWarning,
    ModelError,
    RunFolderError,
    TrainingStopped,
    UnsupportedVersion,
    brief,
)

MISSING = "-"
GAP = 2
"""Spaces between the columns of a table."""
WIDTH = 100
"""Most columns of a paragraph."""


OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would obey instead of showing it, or would show in another order, but for tabs and line ends."""


def visible(text: str) -> str:
    """A text with what a terminal would obey written out: names and cautions in a record may hold anything."""
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: object = "", *, file: IO[str] | None = None) -> None:
    """Print a text and a line end: all that klamp writes to a terminal goes through here, or through rich.

    Args:
        text: what is said.
        file: stdout if None.
    """
    print(visible(str(text)), file=file, flush=True)


def fixed(digits: int) -> Callable[[float], str]:
    """A number with so many digits after the point; very small and very large ones in powers of ten."""

    def write(value: float) -> str:
        size = abs(value)
        if not math.isfinite(value):
            return str(value)
        if size == 0:
            return f"{0:.{digits}f}"
        return f"{value:.{digits}f}" if 0.5 * 10**-digits <= size < 1000 else f"{value:.0e}"

    return write


def duration(seconds: float) -> str:
    """Seconds as text on a clock: 1:02 or 3:04:05."""
    minutes, left = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def room(most: int = WIDTH) -> int:
    """Columns that a line may have: a terminal breaks a longer one anywhere, numbers too."""
    return min(most, shutil.get_terminal_size((most, 24)).columns)


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; columns that a terminal has no room for stand below the others, with the first one again.

    Args:
        title: stands above it.
        headings: of the columns; all empty: no head.
        rows: cells as text.
    """
    lines = [[visible(cell).replace("\n", "\\n") for cell in line] for line in (headings, *rows)]
    lines = lines if any(headings) else lines[1:]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    say(title)
    for number, part in enumerate(_parts(widths) if any(headings) else [list(range(len(widths)))]):
        if number:
            say()
        for line in lines:
            say("  " + (" " * GAP).join(line[i].ljust(widths[i]) for i in part).rstrip())


UNBROKEN = 10_000
"""Columns of a line of a table where no terminal breaks it."""


def _parts(widths: Sequence[int]) -> list[list[int]]:
    """The columns that stand beside each other, the first of all in each part."""
    parts = [[0]]
    for i in range(1, len(widths)):
        if sum(widths[j] + GAP for j in (*parts[-1], i)) > room(UNBROKEN) and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(i)
    return parts


def show_paragraph(text: str, *, label: str = "", width: int = 12) -> None:
    """Print a text, wrapped and indented; a label stands before it in a column of its own."""
    start = f"  {label:<{width}} " if label or width else "  "
    rest = " " * len(start)
    say(textwrap.fill(visible(text), room(), initial_indent=start, subsequent_indent=rest, break_on_hyphens=False))


FAILED, WRONG_CONFIGURATION, INTERRUPTED = 1, 2, 130

SHARED = (ConfigError, DataError, ModelError, RunFolderError, TrainingStopped, UnsupportedVersion)
"""Errors that occur in every process of a run alike: only the first process prints them."""


def process_rank() -> int:
    """The number of this process among those of a launcher; 0 where there is only one."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def is_main_process() -> bool:
    """Whether this is the first process of a run, the only one that prints."""
    return process_rank() == 0


def exit_code(error: KlampError) -> int:
    """The exit code of an error: 2 for a wrong configuration, 130 after Ctrl-C, 1 for all others."""
    if isinstance(error, ConfigError):
        return WRONG_CONFIGURATION
    return INTERRUPTED if was_interrupted(error) else FAILED


def was_interrupted(error: BaseException) -> bool:
    """Whether training was stopped by Ctrl-C rather than by something that went wrong."""
    return isinstance(error, TrainingStopped) and error.interrupted


def of_the_system(error: OSError | SystemExit) -> DataError:
    """The error for a file, a folder or a connection that the system did not let klamp use, in its own words; or for
    code that klamp called and that ended the program.
    """
    if isinstance(error, SystemExit):
        said = f"sys.exit({error.code!r})"
        return DataError("what klamp called has ended the program", got=said, fix="--debug shows where it was called")
    name = "" if error.filename is None else brief(str(error.filename))
    return DataError(
        "the system refused what klamp asked of it",
        got=name or None,
        why=error.strerror or f"{type(error).__name__}: {error}",
        fix="check that path; --debug shows where klamp used it" if name else "--debug shows what klamp was doing",
    )


def show_error(error: KlampError) -> None:
    """Print an error's four parts to stderr; of an error that all processes share, only the first process does."""
    if is_main_process():
        _print_parts(error, "stopped" if was_interrupted(error) else "error")
    elif not isinstance(error, SHARED):
        _print_parts(error, f"error in process {process_rank()}")


def show_caution(text: str) -> None:
    """Print to stderr what the user should know although the run goes on."""
    if is_main_process():
        _write("caution", text, {})


@contextmanager
def cautions_shown() -> Iterator[None]:
    """Within this context, KLWarnings are printed as cautions, each text once; other warnings stay as they are."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", KLWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **named: Any) -> None:
            if not issubclass(category, KLWarning):
                usual(message, category, *where, **named)
            elif str(message) not in seen:
                seen.add(str(message))
                show_caution(str(message))

        warnings.showwarning = show
        yield


def _print_parts(error: KlampError, kind: str) -> None:
    notes = " ".join(note.strip() for note in getattr(error, "__notes__", ()))
    parts = {"got": error.got, "why": error.why, "fix": error.fix, "note": notes}
    _write(kind, error.what, {name: str(text) for name, text in parts.items() if text not in (None, "")})


def _write(kind: str, what: str, parts: dict[str, str]) -> None:
    lines = [f"klamp: {kind}: {what}", *(f"  {name}: {text}" for name, text in parts.items())]
    say("\n".join(lines), file=sys.stderr)
