"""From text to a field's value: one set of rules for the flags of every command and for YAML files.

The types come from the dataclasses of options.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from klamp._field_texts import field_texts
from klamp.errors import ConfigError, unknown_name

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "~")

KINDS: Mapping[Any, str] = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH", bool: "BOOL"}
IN_WORDS = {"INT": "a whole number", "FLOAT": "a number", "STR": "a text", "PATH": "a path", "BOOL": "true or false"}
"""Name of a type in the help -> its name in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a class of options as the command line sees it."""

    name: str
    """The field's name."""
    section: str
    """The section of the configuration that holds it; "" for a command's own."""
    hint: Any
    """The type of the field's value."""
    default: Any
    """The field's default; `dataclasses.MISSING`: a value has to be given."""
    text: str
    """The field's documentation: the text below it in its class."""
    word: str = ""
    """Its name in the help, for a field that is a plain word after the command and no flag."""
    least: float | None = None
    """The smallest number allowed; for a field of several values, the fewest allowed."""
    bare: Any = None
    """The field's value when its flag stands without a value."""
    aliases: tuple[str, ...] = ()
    """Other names of the field, which mean the same."""
    suggested: tuple[str, ...] = ()
    """Names that the help shows, for a field that takes any text."""

    @property
    def members(self) -> tuple[Any, ...]:
        """The types that a value may have, without None."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        return tuple(each for each in (typing.get_args(self.hint) if union else (self.hint,)) if each is not NoneType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that a value may be; empty where it is no name."""
        named = (each for each in self.members if typing.get_origin(each) is Literal)
        return tuple(str(name) for each in named for name in typing.get_args(each))

    @property
    def is_switch(self) -> bool:
        """Whether the field is a switch: `--name` and `--no-name` need no value."""
        return self.members == (bool,)

    @property
    def takes_none(self) -> bool:
        """Whether the field may be None."""
        return NoneType in typing.get_args(self.hint)

    @property
    def count(self) -> int | None:
        """How many values the field takes; None: any number."""
        parts = typing.get_args(self.hint) if typing.get_origin(self.hint) is tuple else (self.hint,)
        return None if parts[-1] is ... else len(parts)

    @property
    def kind(self) -> str:
        """The kind of one value, as the help shows it: INT, FLOAT, STR, PATH, or several with | between."""
        one = typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is tuple else None
        each = typing.get_args(one) or (one,) if one else self.members
        return "NAME" if self.choices else "|".join(KINDS[member] for member in each)

    @property
    def in_words(self) -> str:
        """What a value has to be, in words, for errors."""
        kind = f"one of {', '.join(self.choices)}"
        if not self.choices:
            kind = " or ".join(IN_WORDS[each] for each in self.kind.split("|"))
        if self.count != 1:
            kind = f"{'any number of' if self.count is None else self.count} values, each {kind}"
        return f"{kind}, or None" if self.takes_none else kind

    def convert(self, texts: Sequence[str]) -> Any:
        """The field's value from its words on the command line; their number has been checked.

        Raises:
            ValueError: a text that is no value of its type.
        """
        if typing.get_origin(self.hint) is not tuple:
            return _converted(texts[0], self.hint)
        parts = typing.get_args(self.hint)
        return tuple(_converted(text, parts[0 if self.count is None else i]) for i, text in enumerate(texts))


def _converted(text: str, hint: Any) -> Any:
    """The value of the first type of a union that a text fits.

    Raises:
        ValueError: it fits none.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    if NoneType in members and text == "None":
        return None
    for member in members:
        if typing.get_origin(member) is Literal or member is bool:
            named = {str(value): value for value in typing.get_args(member) or (True, False)}
            if text in named:
                return named[text]
        elif member is not NoneType:
            with suppress(ValueError):
                return member(text)
    raise ValueError(text)


def fields_of(cls: Any, section: str = "") -> dict[str, Field]:
    """The fields of a class of options by name, in its order.

    Args:
        cls: a dataclass; `klamp.cli.options` says what a field's metadata can hold.
        section: the section of the configuration that it is; "" for a command's own.
    """
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    return {
        each.name: Field(
            name=each.name, section=section, hint=hints[each.name], default=each.default, text=texts[each.name],
            **each.metadata,
        )
        for each in dataclasses.fields(cls)
    }  # fmt: skip


def read_value(field: Field, texts: Sequence[str], *, shown: str) -> Any:
    """The value of a field from its texts.

    Args:
        field: the field.
        texts: one text per value.
        shown: where the texts stand, for the message: `--max_steps`, or `max_steps in FILE`.

    Raises:
        UnknownNameError: a name that the field does not know; names the nearest.
        ConfigError: a text that is no value of the field's type, or a number below its least.
    """
    texts = [_usual_spelling(field, text) for text in texts]
    known = field.choices or (("True", "False") if field.is_switch else ())
    fitting = field.count in (None, len(texts))
    named = not (fitting and known) or texts[0] in (*known, *(["None"] if field.takes_none else []))
    if not named and field.choices:
        raise unknown_name(shown, texts[0], field.choices)
    try:
        if not (fitting and named):
            raise ValueError
        value = field.convert(texts)
    except ValueError:
        has_default = field.default not in (MISSING, None)
        raise ConfigError(
            f"{shown} cannot be read",
            got=", ".join(map(repr, texts)) or "no value",
            why=f"it takes {field.in_words}",
            fix=f"for example {' '.join(_texts(field))} (the default)" if has_default else "",
        ) from None
    if field.least is not None and value is not None:
        size, noun = (len(value), " values") if field.count is None else (value, "")
        if not field.least <= size < math.inf:
            raise ConfigError(f"{shown} takes {field.least} or more{noun}", got=value, why=field.text)
    return value


def _usual_spelling(field: Field, text: str) -> str:
    """`true` and `null` as YAML and shells have them, in Python's spelling."""
    word = text.strip().lower()
    if field.is_switch and word in (*TRUE_WORDS, *FALSE_WORDS):
        return str(word in TRUE_WORDS)
    if field.takes_none and word in NONE_WORDS and text not in field.choices:
        return "None"
    return text


def _texts(field: Field) -> list[str]:
    many = isinstance(field.default, tuple)
    return [str(each) for each in field.default] if many else [str(field.default)]
