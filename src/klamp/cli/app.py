"""The entry point: finds the command, and turns whatever it raises into a readable message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from textwrap import shorten

from klamp._version import __version__
from klamp.cli.errors import (
    FAILED,
    INTERRUPTED,
    cautions_shown,
    exit_code,
    of_the_system,
    show_error,
    show_traceback,
)
from klamp.errors import KlampError, UnknownNameError, extra_with, missing_library, without_credentials

FALSE_WORDS = ("", "0", "false", "no")
HELP_FLAGS = ("-h", "--help")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the word after `klamp`, and the module that does it."""

    module: str
    """The module whose `run(argv) -> int` does the command; imported only when it is called."""
    summary: str
    """What the command does, in one line."""
    alone: bool = False
    """Whether the command works without arguments; if not, its help is shown then."""


COMMANDS = {
    "train": Command(
        module="klamp.cli.train",
        summary="train a model with GRPO, its KL held; without arguments the built-in task",
        alone=True,
    ),
    "ablate": Command(
        module="klamp.cli.ablate", summary="compare settings: a grid of flags over seeds, one table, pictures"
    ),
    "evaluate": Command(
        module="klamp.cli.evaluate", summary="score a run or model that is there, and its exact KL to its start"
    ),
    "verify": Command(
        module="klamp.cli.verify", summary="prove klamp's claims on this machine, in seconds", alone=True
    ),
    "explain": Command(module="klamp.cli.explain", summary="what a configuration's KL does, in words and numbers"),
    "audit": Command(module="klamp.cli.audit", summary="what the KL of an installed trainer, or of any function, does"),
    "doctor": Command(module="klamp.cli.doctor", summary="what is wrong with a run, from what it left behind"),
    "report": Command(module="klamp.cli.report", summary="one HTML file that shows a run, or compares several"),
    "model": Command(module="klamp.cli.model", summary="the folder of a real language model that a package carries"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed, 2 wrong configuration, 130 interrupted.

    Args:
        argv: the arguments after the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # trackers keep what they find there
        sys.argv[1:] = map(without_credentials, words)
    debug = "--debug" in words or os.environ.get("KLAMP_DEBUG", "").lower() not in FALSE_WORDS
    words = [word for word in words if word != "--debug"]
    with cautions_shown():
        try:
            return _dispatch(words)
        except KlampError as error:
            if debug:
                show_traceback(error)
            show_error(error)
            return exit_code(error)
        except KeyboardInterrupt as error:
            if debug:
                show_traceback(error)
            print("\nklamp: stopped before there was anything to save", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # `klamp train --help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        except OSError as error:  # a name too long, no permission, a full disk: nothing that klamp could mend
            if debug:
                show_traceback(error)
            show_error(of_the_system(error))
            return FAILED


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and words[1:2]:  # `klamp help train` is `klamp train --help`
        words = [words[1], "--help", *words[2:]]
    if not words or words[0] in ("help", *HELP_FLAGS):
        _print_help()
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"klamp {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise _unknown_command(words[0])
    command, argv = COMMANDS[words[0]], words[1:]
    if not (argv or command.alone) or any(word in HELP_FLAGS for word in argv):
        from klamp.cli.help import show_help

        show_help(words[0], argv)
        return 0
    try:
        return importlib.import_module(command.module).run(argv)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if extra_with(library) is None or find_spec(library) is not None:  # nothing that an extra would bring
            raise
        raise missing_library(library, by=shorten(" ".join(["klamp", *words]), 60)) from error


def _unknown_command(word: str) -> UnknownNameError:
    nearest = get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    if word.startswith("-"):
        nearest = ["train"]
    fix = f"klamp {nearest[0]} {word if word.startswith('-') else ''}".rstrip() if nearest else "see klamp --help"
    return UnknownNameError("unknown command", got=repr(word), why=f"klamp has: {', '.join(COMMANDS)}", fix=fix)


def _print_help() -> None:
    print("usage: klamp COMMAND [flags]\n\nThe KL layer for GRPO-style training of language models.\n\ncommands:")
    for name, command in COMMANDS.items():
        print(f"  {name:<10} {command.summary}")
    print("\nflags:")
    for flags, text in (
        ("-h, --help", "this text; after a command its own, or a part of that: klamp train --help kl"),
        ("-V, --version", "the version"),
        ("--debug", "show the traceback of an error (also: KLAMP_DEBUG=1)"),
    ):
        print(f"  {flags:<14} {text}")
    print("\nStart with `klamp train`: the built-in task, a few minutes on a CPU, nothing to download.")
