"""From argv to a command's options: a field's flags and their texts, both spellings, switches, words without a flag.

The types come from the dataclasses of options; YAML files are read by the same rules.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

from klamp._field_texts import field_texts
from klamp.cli.other_names import OTHER_NAMES
from klamp.errors import ConfigError, UnknownNameError, unknown_name

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
