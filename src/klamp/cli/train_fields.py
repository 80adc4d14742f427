"""The fields of a run's configuration as flags and keys: their names, their aliases, and what others call them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from klamp.cli.flags import Field, fields_of, read_flag, split_flags, unknown_key
from klamp.cli.options import TrainOptions
from klamp.config import ALIASES, PRESETS
from klamp.config.kl import resolve_aliases
from klamp.training.config import section_classes


@functools.cache
def fields() -> dict[str, Field]:
    """Every field that `klamp train` knows, by name."""
    own = fields_of(TrainOptions)
    own["preset"] = dataclasses.replace(own["preset"], suggested=tuple(PRESETS))
    configured = (fields_of(cls, section) for section, cls in section_classes().items())
    every = {name: field for part in (own, *configured) for name, field in part.items()}
    for name in set(ALIASES.values()):
        aliases = tuple(alias for alias, field in ALIASES.items() if field == name)
        every[name] = dataclasses.replace(every[name], aliases=aliases)
    return every


@functools.cache
def fields_by_any_name() -> dict[str, Field]:
    """Every field of `klamp train`, by its name and by each of its aliases."""
    return fields() | {alias: fields()[name] for alias, name in ALIASES.items()}


@functools.cache
def every_flag() -> frozenset[str]:
    """Every flag of `klamp train`, with underscores."""
    off = {f"--no_{field.name}" for field in fields().values() if field.is_switch}
    return frozenset({f"--{name}" for name in fields_by_any_name()} | off | {"--help"})


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The fields that a command line names, under their own names, with their values.

    A flag that is repeated under one name counts as it stands last, as usual; under two names (`--beta`, `--kl_coef`)
    its values must agree.

    Raises:
        UnknownNameError: an unknown flag, or an unknown choice; names the nearest.
        ConfigError: a value that cannot be read, or two names of one field with different values.
    """
    given = dict(read_train_flag(flag, words) for flag, words in split_flags(argv, command="klamp train"))
    return resolve_aliases(given, set(fields()))


def read_train_flag(flag: str, texts: Sequence[str]) -> tuple[str, Any]:
    """The name that a flag stands for, and its value.

    Raises:
        UnknownNameError: an unknown flag, or an unknown choice; names the nearest.
        ConfigError: a value that cannot be read.
    """
    found = read_flag(flag, texts, fields_by_any_name())
    if found is None:
        why = "no field of the configuration has this name"
        raise unknown_key("flag", flag, every_flag(), why=why, command="klamp train")
    return found
