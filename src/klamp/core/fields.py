"""Checks of a configuration's fields against their own types: what a field takes is written once, beside its name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch

from klamp.core.arguments import ANY, Numbers, check_flag, check_instance, check_number, describe
from klamp.errors import ConfigError, check_name

LARGEST = 2**63 - 1
"""The largest whole number that a field takes."""
LARGEST_FLOAT = torch.finfo(torch.float32).max
"""The largest other number."""


@dataclass(frozen=True)
class _Field:
    """What a field of a dataclass takes."""

    name: str
    default: Any
    optional: bool
    """Whether it may be None."""
    choices: tuple[str, ...]
    """Of a Literal; empty where it is none."""
    kinds: tuple[Any, ...]
    """The types that it may be of, None aside."""

    @classmethod
    def of(cls, field: dataclasses.Field[Any], hint: Any) -> _Field:
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = tuple(part for part in parts if part is not NoneType)
        named = tuple(choice for part in kinds if get_origin(part) is Literal for choice in get_args(part))
        return cls(field.name, field.default, NoneType in parts, named, kinds)

    @property
    def fix(self) -> str:
        missing = self.default is dataclasses.MISSING
        return f"pass {self.name}" if missing else f"{self.name}={self.default!r} is the default"


@functools.cache
def _fields(cls: type) -> tuple[_Field, ...]:
    hints = get_type_hints(cls)
    return tuple(_Field.of(field, hints[field.name]) for field in dataclasses.fields(cls))


@functools.cache
def choices(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """What may be chosen in the fields of a dataclass whose type is a Literal; None among it where None may stand."""
    return {each.name: (*each.choices, *((None,) if each.optional else ())) for each in _fields(cls) if each.choices}


def check_fields(config: object, numbers: Mapping[str, Numbers] = MappingProxyType({})) -> None:
    """Refuse what no field of this configuration takes. Types that are not named below are not looked at.

    Choices of a Literal by name; int and float (finite, and no bool); bool; str; tuples of these; other configurations.

    Args:
        config: an instance of a dataclass.
        numbers: which numbers the fields of this name take; the others take every finite one.

    Raises:
        UnknownNameError: a value that is none of its field's choices; names the nearest.
        ConfigError: a value of another type, or a number out of range.
    """
    for field in _fields(type(config)):
        _check(field, getattr(config, field.name), numbers.get(field.name, ANY))


def _check(field: _Field, x: object, numbers: Numbers) -> None:
    if field.choices:
        check_name(field.name, x, (*field.choices, *((None,) if field.optional else ())))
    elif x is None and field.optional:
        return
    elif field.kinds in ((int,), (float,)):
        whole = field.kinds == (int,)
        largest = LARGEST if isinstance(x, int) else LARGEST_FLOAT
        if isinstance(x, int | float) and largest < abs(x) < math.inf:
            raise ConfigError(f"{field.name} is too large", got=describe(x), why="no tensor holds it", fix=field.fix)
        check_number(field.name, x, numbers, whole=whole, optional=field.optional, fix=field.fix)
    elif field.kinds == (bool,):
        check_flag(field.name, x)
    elif field.kinds == (str,):
        _check_text(field, x)
    elif get_origin(field.kinds[0]) is tuple:
        _check_tuple(field, x, numbers)
    elif isinstance(field.kinds[0], type) and dataclasses.is_dataclass(field.kinds[0]):
        check_instance(field.name, x, cast(type, field.kinds[0]))


def _check_text(field: _Field, x: object) -> None:
    if not isinstance(x, str):
        raise ConfigError(
            f"{field.name} must be a text{', or None' if field.optional else ''}",
            got=describe(x),
            why="it is a name, a path or a part of one",
            fix=f"{field.name}={str(x)!r}" if hasattr(x, "__fspath__") else field.fix,
        )


def _check_tuple(field: _Field, x: object, numbers: Numbers) -> None:
    parts = get_args(field.kinds[0])
    kinds = get_args(parts[0]) or parts[:1]
    text = " or ".join({int: "whole numbers", float: "numbers", str: "texts"}[kind] for kind in kinds)
    count = None if parts[-1] is Ellipsis else len(parts)
    for i, each in enumerate(_elements(field, x, count, text)):
        if float in kinds:
            check_number(f"{field.name}[{i}]", each, numbers, fix=field.fix)
        elif not isinstance(each, kinds) or isinstance(each, bool):
            raise ConfigError(
                f"{field.name} must be a tuple of {text}",
                got=f"{describe(each)} at position {i}",
                why="nothing else can stand for a token" if int in kinds else "each of them is a name",
                fix=field.fix,
            )


def _elements(field: _Field, x: object, count: int | None, text: str) -> tuple[object, ...]:
    """The elements of a tuple of the right length; of anything else the error."""
    listed = cast("list[object] | tuple[object, ...]", x if isinstance(x, list | tuple) else [x])
    right_length = count in (None, len(listed))
    if isinstance(x, tuple) and right_length:
        return tuple(listed)
    why = "a configuration cannot change, and a list can" if isinstance(x, list) else "it can hold several"
    why = "a single text would be read letter by letter" if isinstance(x, str) else why
    raise ConfigError(
        f"{field.name} must be a tuple of {f'{count} ' if count else ''}{text}",
        got=describe(cast(object, x)),
        why=why if right_length else f"each of the {count} has a meaning of its own",
        fix=f"{field.name}={tuple(listed)!r}" if right_length and isinstance(x, list | int | str) else field.fix,
    )
