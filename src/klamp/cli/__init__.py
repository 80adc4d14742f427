"""The entry point: finds the command, and turns its errors into a readable message and an exit code."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from textwrap import shorten

from klamp._version import __version__
from klamp.cli.commands import COMMANDS, check_flags, help_of
from klamp.cli.text import FAILED, INTERRUPTED, cautions_shown, exit_code, of_the_system, say, show_error
from klamp.errors import KlampError, extra_with, missing_library, unknown_name, without_credentials

HELP_FLAGS = ("-h", "--help")
HELP = """\
usage: klamp COMMAND [flags]

The KL layer for GRPO-style training of language models.

commands:
{commands}

flags:
  -h, --help     this text; after a command its own
  -V, --version  the version
  --debug        show the traceback of an error

Start with `klamp train`: the built-in task, a few minutes on a CPU, nothing to download."""

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None: this process's); returns 0 done, 1 failed, 2 refused, 130 stopped."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # trackers keep what they find there
        sys.argv[1:] = map(without_credentials, words)
    debug, words = "--debug" in words, [word for word in words if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):  # whose encoding may lack a letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with cautions_shown():
        try:
            return _dispatch(words)
        except BrokenPipeError:  # `klamp train --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except (KlampError, OSError, KeyboardInterrupt, SystemExit) as error:
            if debug:
                traceback.print_exception(error)
            if isinstance(error, KeyboardInterrupt):
                say("\nklamp: stopped; klamp train --resume RUN continues what a run has saved", file=sys.stderr)
                return INTERRUPTED
            shown = error if isinstance(error, KlampError) else of_the_system(error)
            show_error(shown)
            command = COMMANDS.get(words[0]) if words else None
            return exit_code(shown) if command is None or command.refusal is None else command.refusal


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in HELP_FLAGS:
        summaries = {name: str(command.options.__doc__).partition("\n")[0] for name, command in COMMANDS.items()}
        say(HELP.format(commands="\n".join(f"  {name:<10} {text}" for name, text in summaries.items())))
        return 0
    if words[0] in ("-V", "--version"):
        say(f"klamp {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise unknown_name("command", words[0], COMMANDS)
    command = COMMANDS[words[0]]
    if not (words[1:] or command.alone) or any(word in HELP_FLAGS for word in words):
        say(help_of(words[0]))
        return 0
    check_flags(words[0], words[1:])
    module, _, function = command.function.partition(":")
    try:
        return getattr(importlib.import_module(f"klamp.cli.{module}"), function)(words[1:])
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if extra_with(library) is None or find_spec(library) is not None:  # no extra would bring it
            raise
        raise missing_library(library, by=shorten(" ".join(["klamp", *words]), 60)) from error
