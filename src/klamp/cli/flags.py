"""From argv to a command's options: both spellings of a flag, switches with or without a value, words without one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any, TypeVar

from klamp.cli.fields import FALSE_WORDS, TRUE_WORDS, Field, fields_of, read_value
from klamp.cli.other_names import OTHER_NAMES
from klamp.errors import ConfigError, UnknownNameError

Options = TypeVar("Options")
Group = tuple[str, list[str]]
"""A flag as it was spelled, and the words after it."""

YAML = (".yaml", ".yml")
FILE_FLAGS = {"klamp train": "--config", "klamp ablate": "klamp ablate --plan"}
"""Command -> what to write before a YAML file."""


def read_options(options: type[Options], argv: Sequence[str], *, command: str) -> Options:
    """The options of a command, read from its arguments.

    Args:
        options: class of the options; `klamp.cli.options` has them.
        argv: the arguments after the command.
        command: the command, for messages: `klamp verify`.

    Raises:
        UnknownNameError: an unknown flag or choice; names the nearest.
        ConfigError: a value that cannot be read, a word too many, or one that is missing.
    """
    given, _ = read_own(fields_of(options), argv, command=command)
    return options(**given)


def read_own(
    own: Mapping[str, Field], argv: Sequence[str], *, command: str, others: Collection[str] = ()
) -> tuple[dict[str, Any], list[Group]]:
    """Split a command line: the values of a command's own options, and all other flags as they were typed.

    Args:
        own: the command's own fields.
        argv: the arguments after the command.
        command: the command, for messages.
        others: flags, with their dashes, that are not the command's own and yet no mistake.

    Raises:
        UnknownNameError, ConfigError: as `read_options`.
    """
    flagged = {name: field for name, field in own.items() if not field.word}
    first = next((i for i, word in enumerate(argv) if word.startswith("--")), len(argv))
    words, given, left = list(argv[:first]), {}, []
    for flag, after in split_flags(argv[first:], command=command):
        field, off = flagged.get(field_name(flag)), flagged.get(field_name(flag).removeprefix("no_"))
        texts = after
        if (field or off) and len(flagged) < len(own):  # a command of words: what the flag does not take is one
            count = _count_taken(field, after) if field else 0
            texts, words = after[:count], words + after[count:]
        found = read_flag(flag, texts, flagged)
        if found is not None:
            name, value = found
            repeated = field is not None and field.count is None and name in given
            given[name] = given[name] + value if repeated else value
        elif f"--{field_name(flag)}" in others:
            left.append((flag, texts))
        else:
            known = {f"--{name}" for name in flagged} | set(others)
            raise unknown_key("flag", flag, known, why=f"`{command} --help` lists the flags", command=command)
    return given | _read_words(own, words, command), left


def split_flags(argv: Sequence[str], *, command: str) -> list[Group]:
    """The flags of a command line in their order, each with the words that follow it.

    Args:
        argv: the arguments after the command (and after the words that it takes before its flags).
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


def read_flag(flag: str, texts: Sequence[str], known: Mapping[str, Field]) -> tuple[str, Any] | None:
    """The name that a flag stands for, and its value; None where nothing is called so.

    Args:
        flag: as it was spelled.
        texts: the words after it.
        known: fields by each of their names.

    Raises:
        UnknownNameError: an unknown choice; names the nearest.
        ConfigError: a value that cannot be read.
    """
    name = field_name(flag)
    field, switch = known.get(name), known.get(name.removeprefix("no_"))
    if field is not None:
        if not texts and field.bare is not None:
            return name, field.bare
        return name, read_value(field, ["True"] if field.is_switch and not texts else texts, shown=flag)
    if switch is None or not switch.is_switch:
        return None
    if texts:
        raise ConfigError(
            f"{flag} takes no value", got=" ".join(texts), why="it switches off", fix=f"--{switch.name} True"
        )
    return switch.name, False


def unknown_key(kind: str, name: str, known: Collection[str], *, why: str, command: str) -> UnknownNameError:
    """The error for a flag or key that nothing answers to: klamp's own name of what other trainers call so, else the
    nearest, else where to look.

    Args:
        kind: "flag", or "key in" a file.
        name: as it was given.
        known: every flag or key that there is; flags with their dashes.
        why: why it is none of them.
        command: whose help lists them.
    """
    dashes = name[: len(name) - len(name.lstrip("-"))]
    other = OTHER_NAMES.get(field_name(name))
    if other is not None and f"{dashes}{other.field}" in known:
        return UnknownNameError(
            f"unknown {kind}", got=name, why=other.difference, fix=f"did you mean {dashes}{other.field}?"
        )
    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    fix = f"did you mean {nearest[0]}?" if nearest else f"see `{command} --help` for every name"
    return UnknownNameError(f"unknown {kind}", got=name, why=why, fix=fix)


def _count_taken(field: Field, texts: Sequence[str]) -> int:
    """How many of the words after a flag are its values."""
    if field.is_switch:
        return int(bool(texts) and texts[0].lower() in (*TRUE_WORDS, *FALSE_WORDS))
    return len(texts) if field.count is None else field.count


def _read_words(own: Mapping[str, Field], words: Sequence[str], command: str) -> dict[str, Any]:
    """The fields that are words without a flag."""
    given: dict[str, Any] = {}
    left = list(words)
    for word in words:
        if word.startswith("-"):
            raise unknown_key("flag", word, {f"--{name}" for name in own}, why="flags begin with --", command=command)
    for name, field in own.items():
        if not field.word:
            continue
        taken = left if field.count is None else left[:1]
        if taken and field.choices and taken[0].endswith(YAML):
            raise _stray_word(taken[0], command)
        if taken:
            given[name] = read_value(field, taken, shown=field.word.lower())
            left = left[len(taken) :]
        elif field.default is MISSING:
            raise ConfigError(f"{field.word} is missing", why=field.text, fix=f"{command} {field.word} [flags]")
    if left:
        raise _stray_word(left[0], command)
    return given


def _stray_word(word: str, command: str) -> ConfigError:
    takes_it = FILE_FLAGS.get(command) if word.endswith(YAML) else None
    return ConfigError(
        "a word that belongs to no flag",
        got=word,
        why=f"here {command} takes flags only",
        fix=f"{takes_it} {word}" if takes_it else f"write --NAME VALUE; `{command} --help` lists the names",
    )
