"""From text to a field's value: one set of rules for the flags of every command and for YAML files.

The types come from the dataclasses of options, the conversion from tyro; klamp adds the words around it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from klamp._field_texts import field_texts
from klamp.errors import ConfigError, unknown_name

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "~")

IN_WORDS = {"INT": "a whole number", "FLOAT": "a number", "STR": "a text", "PATH": "a path"}
"""tyro's name of a type -> what a person calls it."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a class of options as the command line sees it."""

    name: str
    """Its own name."""
    section: str
    """The section of the configuration that holds it; "" for a command's own."""
    hint: Any
    """Its type."""
    spec: PrimitiveConstructorSpec[Any]
    """tyro's rules for its type."""
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
    def choices(self) -> tuple[str, ...]:
        """The names it may take, if it takes names."""
        kinds = (self.hint, *typing.get_args(self.hint))
        return tuple(
            str(name) for kind in kinds if typing.get_origin(kind) is Literal for name in typing.get_args(kind)
        )

    @property
    def is_switch(self) -> bool:
        """Whether `--name` and `--no-name` need no value."""
        return set(self.spec.choices or ()) - {"None"} == {"True", "False"}

    @property
    def takes_none(self) -> bool:
        """Whether None is a value of it."""
        return typing.get_origin(self.hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(
            self.hint
        )

    @property
    def takes_many(self) -> bool:
        """Whether it takes any number of values."""
        return self.spec.nargs == "*"

    @property
    def kind(self) -> str:
        """tyro's name of the type of one value: INT, FLOAT, STR, PATH, or several with | between."""
        return self.spec.metavar.removeprefix("{None}|").strip("[").split()[0]

    @property
    def in_words(self) -> str:
        """What its value has to be."""
        kind = " or ".join(IN_WORDS.get(each, each) for each in self.kind.split("|"))
        if self.is_switch:
            kind = "true or false"
        elif self.choices:
            kind = f"one of {', '.join(self.choices)}"
        elif self.spec.nargs != 1:
            kind = f"{'any number of' if self.takes_many else self.spec.nargs} values, each {kind}"
        return f"{kind}, or None" if self.takes_none else kind


def fields_of(cls: Any, section: str = "") -> dict[str, Field]:
    """The fields of a class of options by name, in its order.

    Args:
        cls: a dataclass; `klamp.cli.options` says what a field's metadata can hold.
        section: the section of the configuration that it is; "" for a command's own.
    """
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    return {each.name: _field(each, section, hints[each.name], texts[each.name]) for each in dataclasses.fields(cls)}


def _field(each: dataclasses.Field[Any], section: str, hint: Any, text: str) -> Field:
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(hint, set()))
    if not isinstance(spec, PrimitiveConstructorSpec):
        raise TypeError(f"{section}.{each.name}: {hint} cannot be a flag")
    return Field(
        name=each.name, section=section, hint=hint, spec=spec, default=each.default, text=text, **each.metadata
    )


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
    fitting = len(texts) == field.spec.nargs or field.takes_many
    named = not (fitting and field.spec.choices) or texts[0] in field.spec.choices
    if not named and field.choices:
        raise unknown_name(shown, texts[0], field.choices)
    try:
        if not (fitting and named):
            raise ValueError
        value = field.spec.instance_from_str(texts)
    except ValueError:
        has_default = field.default not in (MISSING, None)
        raise ConfigError(
            f"{shown} cannot be read",
            got=", ".join(map(repr, texts)) or "no value",
            why=f"it takes {field.in_words}",
            fix=f"for example {' '.join(_texts(field))} (the default)" if has_default else "",
        ) from None
    if field.least is not None and value is not None:
        size, noun = (len(value), " values") if field.takes_many else (value, "")
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
