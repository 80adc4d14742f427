"""`klamp completion SHELL`: a script with which a shell completes commands, flags and choices; tyro writes it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TextIO, Union

import tyro

from klamp.cli.fields import Field, fields_of
from klamp.cli.flags import read_options
from klamp.cli.options import CompletionOptions
from klamp.cli.pages import PAGES
from klamp.cli.train_fields import fields

FOUND = "get_completions(words, current_index, COMPLETION_SPEC)"
PATHS_ELSE = {FOUND: f'{FOUND} or ["__TYRO_COMPLETE_FILES__"]', "complete -F": "complete -o default -F"}
"""Changes to tyro's script: a shell offers paths where a command knows no names (`klamp report runs/`)."""


def run(argv: Sequence[str], *, stream: TextIO | None = None) -> int:
    """Run `klamp completion` with these arguments; returns the exit code.

    Args:
        argv: the arguments after `completion`.
        stream: where the script goes; None: stdout.

    Raises:
        UnknownNameError, ConfigError: no shell, or another one; the caller shows it.
    """
    options = read_options(CompletionOptions, argv, command="klamp completion")
    print(completion_script(options.shell), file=stream or sys.stdout)
    return 0


def completion_script(shell: str) -> str:
    """The completion script of a shell, as text.

    Args:
        shell: bash, zsh or fish.
    """
    everything = _as_class({}, {name: _command(name) for name in PAGES})
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):  # tyro leaves when it has written it
        tyro.cli(everything, prog="klamp", use_underscores=True, args=["--tyro-write-completion", shell, "-"])
    script = written.getvalue().rstrip()
    for theirs, ours in PATHS_ELSE.items():
        script = script.replace(theirs, ours)
    return script


def _command(name: str) -> type[Any]:
    """A command in tyro's form: its flags, and each name it knows as a subcommand with the same flags."""
    page = PAGES[name]
    own = fields_of(page.options)
    configured = fields() if page.takes_configuration else {name: fields()[name] for name in page.takes}
    every = {key: field for key, field in (own | configured).items() if key in own or key not in page.hidden}
    flags = {key: field for key, field in every.items() if not field.word}
    words = [word for field in own.values() if field.word for word in field.choices]
    return _as_class(flags, {word: _as_class(flags, {}) for word in words})


def _as_class(flags: Mapping[str, Field], commands: Mapping[str, type[Any]]) -> type[Any]:
    """A dataclass in tyro's form: a field per flag, and one for the subcommand that may follow."""
    shown: list[Any] = [
        (name, _hint(field), dataclasses.field(default=_default(field))) for name, field in flags.items()
    ]
    if commands:
        each = [Annotated[cls, tyro.conf.subcommand(name)] for name, cls in commands.items()]
        each.append(Annotated[None, tyro.conf.Suppress])  # never shown; tyro takes a union of one for no union
        shown.append(("command", tyro.conf.OmitSubcommandPrefixes[Union[tuple(each)]]))  # noqa: UP007  (made at run time)
    return dataclasses.make_dataclass("Flags", shown, kw_only=True)


def _hint(field: Field) -> Any:
    hint = Literal[field.suggested] if field.suggested else field.hint  # pyright: ignore[reportInvalidTypeForm]
    return Annotated[hint, tyro.conf.arg(help=field.text, aliases=[f"--{name}" for name in field.aliases])]


def _default(field: Field) -> Any:
    return field.suggested[0] if field.suggested else field.default
