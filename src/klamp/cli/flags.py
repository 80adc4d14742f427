"""The command line by argparse: the fields of dataclasses are the flags, and the texts under them are the help."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn

from klamp._field_texts import field_texts
from klamp.errors import ConfigError, unknown_name
from klamp.files import at_home

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "~")


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a class of options as the command line sees it."""

    name: str
    section: str  # of the configuration; "" for a command's own
    types: tuple[Any, ...]  # that one value may have
    count: int | None  # how many values it takes; None: any number, as a tuple
    default: Any  # dataclasses.MISSING: a value has to be given
    text: str  # what its class says under it
    word: str = ""  # its name in the help, if it is a plain word after the command and no flag
    least: float | None = None
    aliases: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that a value may be; empty if it is no name."""
        literals = (kind for kind in self.types if typing.get_origin(kind) is Literal)
        return tuple(name for literal in literals for name in typing.get_args(literal))

    @property
    def is_switch(self) -> bool:
        """Whether the field is a switch: `--name` and `--no_name` need no value."""
        return bool in self.types

    @property
    def kind(self) -> str:
        """The kind of one value, as the help shows it: INT, FLOAT, STR, PATH, or several with | between."""
        kinds = (kind.__name__.upper() for kind in self.types if isinstance(kind, type) and kind is not NoneType)
        return "NAME" if self.choices else "|".join(kinds)

    def read(self, text: str) -> Any:
        """One value from its text; an ArgumentTypeError if the text is not such a value."""
        word = text.strip().lower()
        if text in self.choices:
            return text
        if NoneType in self.types and word in NONE_WORDS:
            return None
        if self.is_switch and word in (*TRUE_WORDS, *FALSE_WORDS):
            return word in TRUE_WORDS
        for kind in filter(self.types.__contains__, (int, float, Path, str)):
            with suppress(ValueError):
                value: Any = at_home(text) if kind is Path else kind(text)
                if self.least is not None and not self.least <= value < math.inf:
                    raise argparse.ArgumentTypeError(f"{text} is not a number of {self.least} or more")
                return value
        if self.choices:
            raise argparse.ArgumentTypeError(f"unknown name {text!r}, {unknown_name('', text, self.choices).fix}")
        raise argparse.ArgumentTypeError(f"{text!r} is no {self.kind}")


def fields_of(cls: Any, section: str = "") -> dict[str, Field]:
    """The fields of a class of options by name, in its order; `klamp.cli.commands` explains their metadata."""
    hints, texts, fields = typing.get_type_hints(cls), field_texts(cls), dict[str, Field]()
    for field in dataclasses.fields(cls):
        name, hint = field.name, hints[field.name]
        parts = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
        union = typing.get_origin(parts[0]) in (typing.Union, types.UnionType)
        fields[name] = Field(
            name=name,
            section=section,
            types=typing.get_args(parts[0]) if union else parts[:1],
            count=None if parts[-1] is ... else len(parts),
            default=field.default,
            text=texts[name],
            **{key: field.metadata[key] for key in ("word", "least", "aliases") if key in field.metadata},
        )
    return fields


@functools.cache
def configured_fields() -> dict[str, Field]:
    """Every field of the configuration of a run, by its name."""
    from klamp.lab.config import section_classes

    parts = (fields_of(cls, section) for section, cls in section_classes().items())
    every = {name: field for part in parts for name, field in part.items()}
    every["resume"] = dataclasses.replace(every["resume"], types=(bool, str))  # a folder is output_dir besides
    return every


CONFIGURED = ("config/kl.py", "config/teacher.py", "config/loss.py", "lab/tasks/base.py", "lab/config.py")
"""The files in klamp that declare these fields."""


@functools.cache
def configured_names() -> set[str]:
    """The names of these fields, other names included, read from the source: an import would bring torch."""
    text = "".join((files("klamp") / place).read_text(encoding="utf-8") for place in CONFIGURED)
    bodies = "".join(re.findall(r"^class (?!Train)\w+Config:\n(.*?)(?=^\S)", text, re.MULTILINE | re.DOTALL))
    aliases = "".join(re.findall(r"aliases=\((.*?)\)", bodies))
    return {*re.findall(r"^    ([a-z]\w*): ", bodies, re.MULTILINE), *re.findall(r"\w+", aliases)}


def underscored(word: str) -> str:
    """A word of a command line, a flag as its field is written."""
    return re.sub("^--[^=]+", lambda flag: f"--{flag[0][2:].replace('-', '_')}", word)


def unknown_flag(word: str, flags: Collection[str], *, command: str) -> ConfigError:
    """The error for a word that a command does not take."""
    got, why, fix = word.partition("=")[0], f"{command} has no such flag", f"`{command} --help` shows how to call it"
    return unknown_name("flag or word", got, flags, why=why, fix=fix)


def read_argv(
    fields: Mapping[str, Field], argv: Sequence[str], *, command: str, several: Collection[str] = ()
) -> dict[str, Any]:
    """The fields that a command line names, under their own names, with their values; `command` is for messages.

    If a flag is repeated, the last one counts; the values of a flag with several add up. A field in `several` takes
    more values than one, which are a list.
    """
    parser = _Parser(usage=command, add_help=False, allow_abbrev=False, exit_on_error=False)
    for field in fields.values():
        add_field(parser, field, several=field.name in several)
    try:
        parsed, left = parser.parse_known_intermixed_args([*map(underscored, argv)])
    except argparse.ArgumentError as error:
        named = (error.argument_name or command).partition("/")[0]  # without its aliases
        field = fields.get(named.removeprefix("--").removeprefix("no_"))
        why = "nothing else says what it works on" if field is None else field.text
        fix = f"`{command} --help` shows how to call it"
        raise ConfigError(f"{named}: {error.message}", why=why, fix=fix) from None
    if left:
        word = next((word for word in left if word.startswith("-")), left[0])
        raise unknown_flag(word, parser._option_string_actions, command=command)
    values = vars(parsed)
    for name, value in values.items():
        if isinstance(value, list):
            one = (*value, True)[0]  # a bare switch is on
            values[name] = tuple(value) if name not in several else value if len(value) > 1 else one
    return values


class _Parser(argparse.ArgumentParser):
    """argparse that raises what it refuses, instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def add_field(group: Any, field: Field, *, several: bool = False) -> None:
    """Add a field to a parser or a part of it, with its aliases and its opposite; `several`: it takes more values.

    A switch of a command takes no value, since a word may follow it; one of the configuration may: `--cpu false`.
    """
    many, text = field.count is None, _help(field).replace("%", "%%")
    shared = {"default": argparse.SUPPRESS, "help": text, "type": field.read}
    if field.word:
        nargs: Any = ("+" if many else None) if field.default is MISSING else "*" if many else "?"
        group.add_argument(field.name, metavar=field.word, nargs=nargs, **shared | {"default": None})
        return
    names = [f"--{name}" for name in (field.name, *field.aliases)]
    if field.is_switch and not field.section:
        group.add_argument(*names, dest=field.name, action="store_true", default=argparse.SUPPRESS, help=text)
    else:
        nargs = "+" if (several or not field.section) and not field.is_switch else "*"
        nargs = nargs if many or several else field.count if field.count != 1 else "?" if field.is_switch else None
        shared |= {"nargs": nargs, "action": "extend" if many else "store", "const": True if nargs == "?" else None}
        required = field.default is MISSING
        group.add_argument(*names, dest=field.name, metavar=field.kind, required=required, **shared)
    if field.is_switch:
        shared = {"action": "store_false", "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(f"--no_{field.name}", dest=field.name, **shared)


def _help(field: Field) -> str:
    names = f" One of {', '.join(field.choices)}." if any(name not in field.text for name in field.choices) else ""
    default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{field.text}{names}" + ("" if default in (MISSING, None, "", False) else f" (default: {default})")
