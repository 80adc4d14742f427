"""Values that differ from a field's default, read from its type, and configurations that nothing has checked."""

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, combinations
from typing import Any, Literal, get_args, get_origin, get_type_hints

from klamp.config import KLConfig, LossConfig, TeacherConfig
from klamp.errors import ConfigError

CONFIGS = (KLConfig, TeacherConfig, LossConfig)
HINTS = {cls: get_type_hints(cls) for cls in CONFIGS}
FIELDS = [(cls, field) for cls in CONFIGS for field in dataclasses.fields(cls)]
IDS = [field.name for _, field in FIELDS]
URL = "http://localhost:1"
GIVEN = {"reference_url": URL, "teacher_url": URL, "teacher_models": ("a=DIR",), "beta_min": 0.001, "teacher_coef": 0.5}
"""Fields whose type does not say what a value looks like."""


def unchecked(cls: Any, **fields: Any) -> Any:
    made = object.__new__(cls)
    vars(made).update({field.name: field.default for field in dataclasses.fields(cls)} | fields)
    return made


def other_values(cls: Any, field: Any) -> list[Any]:
    """Values that a field may have and that differ from its default: each other choice of a name, else one."""
    hint = HINTS[cls][field.name]
    kinds = [hint, *get_args(hint)]
    names = [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    if field.name in GIVEN or names:
        return [name for name in names if name != field.default] or [GIVEN[field.name]]
    if isinstance(field.default, bool):
        return [not field.default]
    if isinstance(field.default, tuple):
        return [tuple(x + 0.1 for x in field.default) or ("special",)]
    return [(field.default or 0) / 3 + 0.1 if float in kinds else (field.default or 0) + 7 if int in kinds else "x"]


@functools.cache
def other_configurations(cls: Any) -> list[dict[str, Any]]:
    """The default, and each configuration in which one field has another value."""
    found: list[dict[str, Any]] = [{}]
    for field in dataclasses.fields(cls):
        number = isinstance(field.default, int | float)
        found += [{field.name: value} for value in (*other_values(cls, field), *([0] if number else []))]
    if cls is KLConfig:
        found.append({"beta": -0.2})  # beside a teacher
    return found


def around(cls: Any, field: Any, count: int | None = None) -> Iterator[dict[str, Any]]:
    """Changes of one or two fields that meet what a field needs, or the first `count` of its needs."""
    pairs = ({**one, **two} for one, two in combinations(other_configurations(cls), 2))
    drawn = ({name: x for name, x in c.items() if name != field.name} for c in chain([{}], pairs))
    needs = field.metadata.get("needs", ())[:count]
    return (c for c in drawn if all(need.is_met(unchecked(cls, **c)) for need in needs))


def accepted(cls: Any, field: Any, **fields: Any) -> Any:
    """A configuration in which a field has another value and what it needs, and which is not refused."""
    with warnings.catch_warnings(action="ignore"):
        for other in around(cls, field):
            for value in other_values(cls, field):
                with suppress(ConfigError):
                    return cls(**fields | other | {field.name: value})
    raise AssertionError(f"no value of {field.name} is accepted")
