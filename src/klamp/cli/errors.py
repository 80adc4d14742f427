"""Errors and cautions as a person reads them, each once, and the exit codes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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
    return isinstance(error, TrainingStopped) and isinstance(error.__cause__ or error.__context__, KeyboardInterrupt)


def of_the_system(error: OSError) -> DataError:
    """The error for a file, a folder or a connection that the system did not let klamp use, in its own words."""
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


def show_traceback(error: BaseException) -> None:
    """Print an error's traceback to stderr."""
    traceback.print_exception(error, file=sys.stderr)


@contextmanager
def cautions_shown() -> Iterator[None]:
    """Within this context, KLWarnings are printed as cautions, each text once; other warnings stay as they are."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", KLWarning)
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, KLWarning):
                usual(message, category, filename, lineno, file, line)
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
    print("\n".join(lines), file=sys.stderr, flush=True)
