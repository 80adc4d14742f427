"""From text to a field's value: one set of rules for the flags of every command and for YAML files.

The types come from the dataclasses of options, the conversion from tyro, which is loaded with the first text that is
read: help needs none of it. klamp adds the words around it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
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
"""What help calls a type -> what a sentence calls it."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a class of options as the command line sees it."""

    name: str
    """Its own name."""
    section: str
    """The section of the configuration that holds it; "" for a command's own."""
    hint: Any
    """Its type."""
    default: Any
    """Its default; `dataclasses.MISSING`: it has to be given."""
    text: str
    """What stands under it in its class."""
    word: str = ""
    """What the help calls it where it is no flag but a word after the command."""
    least: float | None = None
    """The smallest number that it takes; of any number of values, how many at least."""
    bare: Any = None
    """Its value where the flag stands alone."""
    aliases: tuple[str, ...] = ()
    """Other names that count as much as its own."""
    suggested: tuple[str, ...] = ()
    """Names worth offering where it takes any text."""

    @property
    def members(self) -> tuple[Any, ...]:
        """Its type, or those of which it is a union; without None."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        return tuple(each for each in (typing.get_args(self.hint) if union else (self.hint,)) if each is not NoneType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names it may take, if it takes names."""
        named = (each for each in self.members if typing.get_origin(each) is Literal)
        return tuple(str(name) for each in named for name in typing.get_args(each))

    @property
    def is_switch(self) -> bool:
        """Whether `--name` and `--no-name` need no value."""
        return self.members == (bool,)

    @property
    def takes_none(self) -> bool:
        """Whether None is a value of it."""
        return NoneType in typing.get_args(self.hint)

    @property
    def count(self) -> int | None:
        """How many values it takes; None: any number."""
        parts = typing.get_args(self.hint) if typing.get_origin(self.hint) is tuple else (self.hint,)
        return None if parts[-1] is ... else len(parts)

    @property
    def kind(self) -> str:
        """What the help calls one value: INT, FLOAT, STR, PATH, or several with | between."""
        one = typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is tuple else None
        each = typing.get_args(one) or (one,) if one else self.members
        return "NAME" if self.choices else "|".join(KINDS[member] for member in each)

    @property
    def in_words(self) -> str:
        """What its value has to be."""
        kind = f"one of {', '.join(self.choices)}"
        if not self.choices:
            kind = " or ".join(IN_WORDS[each] for each in self.kind.split("|"))
        if self.count != 1:
            kind = f"{'any number of' if self.count is None else self.count} values, each {kind}"
        return f"{kind}, or None" if self.takes_none else kind

    def convert(self, texts: Sequence[str]) -> Any:
        """Its value from texts that fit in number and name, as tyro reads them.

        Raises:
            ValueError: a text that is no value of its type.
        """
        from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(self.hint, set()))
        assert isinstance(spec, PrimitiveConstructorSpec), f"{self.name}: {self.hint} cannot be a flag"
        return spec.instance_from_str(list(texts))


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
