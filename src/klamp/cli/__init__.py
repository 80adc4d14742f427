"""The entry point: finds the command, and turns whatever it raises into a readable message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from textwrap import shorten

from klamp._version import __version__
from klamp.cli.flags import FALSE_WORDS
from klamp.cli.help import COMMANDS, help_of
from klamp.cli.text import FAILED, INTERRUPTED, cautions_shown, exit_code, of_the_system, say, show_error
from klamp.errors import KlampError, UnknownNameError, extra_with, missing_library, without_credentials

HELP_FLAGS = ("-h", "--help")
FLAGS = {
    "-h, --help": "this text; after a command its own",
    "-V, --version": "the version",
    "--debug": "show the traceback of an error (also: KLAMP_DEBUG=1)",
}

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed, 2 wrong configuration, 130 interrupted.

    `argv` are the arguments after the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # trackers keep what they find there
        sys.argv[1:] = map(without_credentials, words)
    debug = "--debug" in words or os.environ.get("KLAMP_DEBUG", "").lower() not in ("", *FALSE_WORDS)
    words = [word for word in words if word != "--debug"]
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
                say("\nklamp: stopped before there was anything to save", file=sys.stderr)
                return INTERRUPTED
            shown = error if isinstance(error, KlampError) else of_the_system(error)
            show_error(shown)
            command = COMMANDS.get(words[0]) if words else None
            return exit_code(shown) if command is None or command.refusal is None else command.refusal


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and words[1:2]:  # `klamp help train` is `klamp train --help`
        words = [words[1], "--help"]
    if not words or words[0] in ("help", *HELP_FLAGS):
        _print_help()
        return 0
    if words[0] in ("-V", "--version", "version"):
        say(f"klamp {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise _unknown_command(words[0])
    if not (words[1:] or COMMANDS[words[0]].alone) or any(word in HELP_FLAGS for word in words):
        say(help_of(words[0]))
        return 0
    try:
        return importlib.import_module(f"klamp.cli.{words[0]}").run(words[1:])
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if extra_with(library) is None or find_spec(library) is not None:  # no extra would bring it
            raise
        raise missing_library(library, by=shorten(" ".join(["klamp", *words]), 60)) from error


def _unknown_command(word: str) -> UnknownNameError:
    nearest = ["train"] if word.startswith("-") else get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    flag = f" {word}" if word.startswith("-") else ""
    fix = f"klamp {nearest[0]}{flag}" if nearest else "see klamp --help"
    return UnknownNameError("unknown command", got=repr(word), why=f"klamp has: {', '.join(COMMANDS)}", fix=fix)


def _print_help() -> None:
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    flags = "\n".join(f"  {flag:<14} {text}" for flag, text in FLAGS.items())
    say("usage: klamp COMMAND [flags]\n\nThe KL layer for GRPO-style training of language models.")
    say(f"\ncommands:\n{commands}\n\nflags:\n{flags}")
    say("\nStart with `klamp train`: the built-in task, a few minutes on a CPU, nothing to download.")
