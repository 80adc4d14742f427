"""From argv to the fields that it names: both spellings of a flag, aliases, switches with or without a value."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

from klamp.cli.fields import Field, fields, known_names, read_value
from klamp.config import ALIASES
from klamp.config.kl import resolve_aliases
from klamp.errors import ConfigError, UnknownNameError

Group = tuple[str, list[str]]
"""A flag as it was spelled, and the words after it."""


def read_flags(argv: Sequence[str]) -> dict[str, Any]:
    """The fields that a command line names, under their own names, with their values.

    A flag that is repeated under one name counts as it stands last, as usual; under two names (`--beta`, `--kl_coef`)
    its values must agree.

    Raises:
        UnknownNameError: an unknown flag, or an unknown choice; names the nearest.
        ConfigError: a value that cannot be read, or two names of one field with different values.
    """
    given = dict(read_group(flag, words) for flag, words in split_flags(argv))
    return resolve_aliases(given, set(fields()))


def split_flags(argv: Sequence[str], *, command: str = "klamp train") -> list[Group]:
    """The flags of a command line in their order, each with the words that follow it.

    Args:
        argv: the words after the command (and after what it takes before its flags).
        command: the command, for the message.

    Raises:
        ConfigError: a word before the first flag.
    """
    groups: list[Group] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif not groups:
            raise _stray_word(word, command)
        else:
            groups[-1][1].append(word)
    return groups


def field_name(flag: str) -> str:
    """The name of the field (or alias, or `no_` and a switch) that a flag spells, with underscores."""
    return flag.removeprefix("--").replace("-", "_")


def unknown_key(
    kind: str, name: str, known: Collection[str], *, why: str, command: str = "klamp train"
) -> UnknownNameError:
    """The error for a flag or key that nothing answers to: the nearest if there is one, else where to look."""
    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    fix = f"did you mean {nearest[0]}?" if nearest else f"see `{command} --help` for every name"
    return UnknownNameError(f"unknown {kind}", got=name, why=why, fix=fix)


def read_group(flag: str, words: list[str]) -> tuple[str, Any]:
    """The name that a flag stands for, and its value.

    Raises:
        UnknownNameError: an unknown flag, or an unknown choice; names the nearest.
        ConfigError: a value that cannot be read.
    """
    name = field_name(flag)
    field = find_field(name)
    if field is not None:
        switched_on = field.is_switch and not words
        return name, read_value(field, ["True"] if switched_on else words, shown=flag)
    switch = find_field(name.removeprefix("no_"))
    if name.startswith("no_") and switch is not None and switch.is_switch:
        if words:
            raise ConfigError(
                f"{flag} takes no value", got=" ".join(words), why="it switches off", fix=f"--{switch.name} True"
            )
        return switch.name, False
    raise unknown_key("flag", flag, every_flag(), why="no field of the configuration has this name")


def find_field(name: str) -> Field | None:
    """The field of this name or alias; None where there is none."""
    return fields().get(ALIASES.get(name, name))


def every_flag() -> set[str]:
    """Every flag of `klamp train`."""
    off = {f"--no_{field.name}" for field in fields().values() if field.is_switch}
    return {f"--{name}" for name in known_names()} | off | {"--help"}


def _stray_word(word: str, command: str) -> ConfigError:
    is_file = command == "klamp train" and word.endswith((".yaml", ".yml"))
    return ConfigError(
        "a word that belongs to no flag",
        got=word,
        why=f"here {command} takes flags only",
        fix=f"--config {word}" if is_file else f"write --NAME VALUE; `{command} --help` lists the names",
    )
