"""From text to a field's value: one set of rules for flags and for YAML files.

The types come from the configuration classes, the conversion from tyro; klamp adds the words around it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from klamp.cli.options import TrainOptions
from klamp.config import ALIASES
from klamp.errors import ConfigError, unknown_name
from klamp.training.config import section_classes

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "~")

IN_WORDS = {"INT": "a whole number", "FLOAT": "a number", "STR": "a text"}
"""tyro's name of a type -> what a person calls it."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of the configuration (or of the command) as the command line sees it."""

    name: str
    """Its own name; aliases lead to it."""
    section: str
    """The section that holds it; "" for the command's own."""
    spec: PrimitiveConstructorSpec[Any]
    """tyro's rules for its type."""
    default: Any
    """Its default."""
    takes_none: bool
    """Whether None is a value of it."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The names it may take, if it takes names."""
        return () if self.is_switch else tuple(c for c in self.spec.choices or () if c != "None")

    @property
    def is_switch(self) -> bool:
        """Whether `--name` and `--no-name` need no value."""
        return set(self.spec.choices or ()) - {"None"} == {"True", "False"}

    @property
    def in_words(self) -> str:
        """What its value has to be."""
        one = self.spec.metavar.removeprefix("{None}|").strip("[").split()[0]
        kind = " or ".join(IN_WORDS.get(each, each) for each in one.split("|"))
        if self.is_switch:
            kind = "true or false"
        elif self.choices:
            kind = f"one of {', '.join(self.choices)}"
        elif self.spec.nargs != 1:
            kind = f"{'any number of' if self.spec.nargs == '*' else self.spec.nargs} values, each {kind}"
        return f"{kind}, or None" if self.takes_none else kind


@functools.cache
def fields() -> dict[str, Field]:
    """Every field that the command line knows, by name."""
    sections = {"": TrainOptions, **section_classes()}
    return {field.name: field for section, cls in sections.items() for field in fields_of(section, cls)}


def known_names() -> set[str]:
    """Field names and their aliases."""
    return {*fields(), *ALIASES}


def read_value(field: Field, texts: Sequence[str], *, shown: str) -> Any:
    """The value of a field from its texts.

    Args:
        field: the field.
        texts: one text per value.
        shown: where the texts stand, for the message: `--max_steps`, or `max_steps in FILE`.

    Raises:
        UnknownNameError: a name that the field does not know; names the nearest.
        ConfigError: a text that is no value of the field's type.
    """
    texts = [_usual_spelling(field, text) for text in texts]
    fitting = len(texts) == field.spec.nargs or field.spec.nargs == "*"
    named = not (fitting and field.spec.choices) or texts[0] in field.spec.choices
    if not named and field.choices:
        raise unknown_name(shown, texts[0], field.choices)
    try:
        if not (fitting and named):
            raise ValueError
        return field.spec.instance_from_str(texts)
    except ValueError:
        raise ConfigError(
            f"{shown} cannot be read",
            got=", ".join(map(repr, texts)) or "no value",
            why=f"it takes {field.in_words}",
            fix=f"for example {' '.join(_texts(field))} (the default)",
        ) from None


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


def fields_of(section: str, cls: Any) -> list[Field]:
    """The fields of a class of options, in its order.

    Args:
        section: the section that it is.
        cls: a dataclass whose fields all have defaults.
    """
    hints, defaults = typing.get_type_hints(cls), cls()
    return [
        _field(each.name, section, hints[each.name], getattr(defaults, each.name)) for each in dataclasses.fields(cls)
    ]


def _field(name: str, section: str, hint: Any, default: Any) -> Field:
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(hint, set()))
    if not isinstance(spec, PrimitiveConstructorSpec):
        raise TypeError(f"{section}.{name}: {hint} cannot be a flag")
    takes_none = typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)
    return Field(name=name, section=section, spec=spec, default=default, takes_none=takes_none)
