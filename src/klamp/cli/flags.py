"""The command line by argparse: the fields of dataclasses are the flags, and the texts under them are the help.

argparse finds which words belong to which flag; the type of a field reads them, on a command line and in a file alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar

from klamp._field_texts import field_texts
from klamp.cli.options import TrainOptions
from klamp.errors import ConfigError, UnknownNameError, unknown_name

Options = TypeVar("Options")
TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "~")
KINDS: Mapping[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a text"),
    Path: ("PATH", "a path"),
    bool: ("BOOL", "true or false"),
}
"""Type of a value -> its name in the help, and in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a class of options as the command line sees it."""

    name: str
    section: str = ""
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
    """The smallest number allowed."""
    aliases: tuple[str, ...] = ()
    """Other names of the field, which mean the same."""

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that one value may have; NoneType is among them where it may be None."""
        one = typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is tuple else self.hint
        return typing.get_args(one) if typing.get_origin(one) in (typing.Union, types.UnionType) else (one,)

    @property
    def count(self) -> int | None:
        """How many values the field takes; None: any number."""
        parts = typing.get_args(self.hint) if typing.get_origin(self.hint) is tuple else (self.hint,)
        return None if parts[-1] is ... else len(parts)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that a value may be; empty if it is no name."""
        named = (each for each in self.types if typing.get_origin(each) is Literal)
        return tuple(str(name) for each in named for name in typing.get_args(each))

    @property
    def is_switch(self) -> bool:
        """Whether the field is a switch: `--name` and `--no_name` need no value."""
        return bool in self.types

    @property
    def kind(self) -> str:
        """The kind of one value, as the help shows it: INT, FLOAT, STR, PATH, or several with | between."""
        return "NAME" if self.choices else "|".join(KINDS[each][0] for each in self.types if each is not NoneType)

    @property
    def in_words(self) -> str:
        """What a value has to be, in words, for errors."""
        kind = " or ".join(KINDS[each][1] for each in self.types if each in KINDS)
        kind = f"one of {', '.join(self.choices)}" if self.choices else kind
        if self.count != 1:
            kind = f"{'any number of' if self.count is None else self.count} values, each {kind}"
        return f"{kind}, or None" if NoneType in self.types else kind

    def read(self, texts: Sequence[str], *, shown: str) -> Any:
        """The field's value from its texts; `shown` is the place of the texts: `--max_steps`, or `max_steps in FILE`.

        Raises:
            UnknownNameError: a name that the field does not have; names the nearest.
            ConfigError: a text that is no value of the field's type, or a number below its least.
        """
        if self.count not in (None, len(texts)):
            raise self.refused(texts, shown=shown)
        values = tuple(self._one(text, texts, shown) for text in texts)
        if self.least is not None and values[0] is not None and not self.least <= values[0] < math.inf:
            raise ConfigError(f"{shown} takes {self.least} or more", got=values[0], why=self.text)
        return values if typing.get_origin(self.hint) is tuple else values[0]

    def _one(self, text: str, texts: Sequence[str], shown: str) -> Any:
        """The value of the first type that a text fits; `true` and `null` as YAML and shells have them, too."""
        word = text.strip().lower()
        if NoneType in self.types and word in NONE_WORDS and text not in self.choices:
            return None
        if self.is_switch and word in (*TRUE_WORDS, *FALSE_WORDS):
            return word in TRUE_WORDS
        for each in self.types:
            if typing.get_origin(each) is Literal and text in self.choices:
                return typing.get_args(each)[self.choices.index(text)]
            if each in KINDS and each is not bool:
                with suppress(ValueError, RuntimeError):  # the home folder of nobody
                    return Path(text).expanduser() if each is Path else each(text)
        raise unknown_name(shown, text, self.choices) if self.choices else self.refused(texts, shown=shown)

    def refused(self, texts: Sequence[str], *, shown: str) -> ConfigError:
        """The error for texts that are no value of the field."""
        default = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return ConfigError(
            f"{shown} cannot be read",
            got=", ".join(map(repr, texts)) or "no value",
            why=f"it takes {self.in_words}",
            fix="" if default in (MISSING, None) else f"for example {default} (the default)",
        )


def fields_of(cls: Any, section: str = "") -> dict[str, Field]:
    """The fields of a class of options by name, in its order; `klamp.cli.options` explains their metadata."""
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    return {
        each.name: Field(
            name=each.name, section=section, hint=hints[each.name], default=each.default, text=texts[each.name],
            **each.metadata,
        )
        for each in dataclasses.fields(cls)
    }  # fmt: skip


@functools.cache
def train_fields() -> dict[str, Field]:
    """Every field that `klamp train` knows, by name: its own, then those of the configuration."""
    from klamp.config.teacher import ALL_ALIASES
    from klamp.training.config import section_classes

    configured = (fields_of(cls, section) for section, cls in section_classes().items())
    every = {name: field for part in (fields_of(TrainOptions), *configured) for name, field in part.items()}
    every["resume"] = dataclasses.replace(every["resume"], hint=bool | str)  # a folder is output_dir besides
    for name in set(ALL_ALIASES.values()):
        aliases = tuple(alias for alias, field in ALL_ALIASES.items() if field == name)
        every[name] = dataclasses.replace(every[name], aliases=aliases)
    return every


def by_any_name(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields by their names and by each of their aliases."""
    return {name: field for field in fields.values() for name in (field.name, *field.aliases)}


def read_options(options: type[Options], argv: Sequence[str], *, command: str) -> Options:
    """The options of a command, read from the arguments after it; errors as `read_argv`."""
    return options(**read_argv(fields_of(options), argv, command=command))


def read_argv(
    fields: Mapping[str, Field], argv: Sequence[str], *, command: str, several: Collection[str] = ()
) -> dict[str, Any]:
    """The fields that a command line names, under their own names, with their values.

    If a flag is repeated, the last one counts; the values of a flag with several add up.

    Args:
        fields: the fields of the command.
        argv: the arguments after the command.
        command: the command, for messages.
        several: fields of one value that take several here; several values of theirs are a list.

    Raises:
        UnknownNameError: an unknown flag or choice; names the nearest.
        ConfigError: a value that cannot be read or is missing, or a word that belongs to no flag.
    """
    parser, known = _Parser(usage=command, add_help=False, allow_abbrev=False, exit_on_error=False), by_any_name(fields)
    for field in fields.values():
        add_field(parser, field, several=field.name in several)
    try:
        found, left = parser.parse_known_intermixed_args(_spelled(argv, known))
    except argparse.ArgumentError as error:
        shown = (error.argument_name or command).partition("/")[0]
        if field := known.get(shown.removeprefix("--")):
            raise field.refused([], shown=shown) from None
        raise ConfigError(f"{shown}: {error.message}", fix=f"`{command} --help` shows how to call it") from None
    if flag := next((word for word in left if word.startswith("-")), None):
        flags = {f"--{name}" for name, field in known.items() if not field.word}
        flags |= {f"--no_{name}" for name, field in known.items() if field.is_switch}
        raise unknown_key("flag", flag.partition("=")[0], flags, why=f"{command} has no such flag", command=command)
    if left:
        fix = f"write --NAME VALUE (for a file: --config {left[0]}); `{command} --help` lists the names"
        raise ConfigError("a word that belongs to no flag", got=left[0], fix=fix)
    given: dict[str, Any] = {}
    for name, texts in vars(found).items():
        field, each = fields[name], [texts] if isinstance(texts, str) else texts
        shown = field.word.lower() or f"--{name}"
        many = name in several and len(each) > 1
        given[name] = [field.read([one], shown=shown) for one in each] if many else field.read(each, shown=shown)
    return given


class _Parser(argparse.ArgumentParser):
    """argparse that raises what it refuses, instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def add_field(group: Any, field: Field, *, several: bool = False) -> None:
    """Add a field to a parser or a part of it, with its aliases and its opposite; `several`: it takes more values."""
    many, unset = field.count is None, argparse.SUPPRESS
    text = _help(field).replace("%", "%%")
    if field.word:
        required = field.default is MISSING
        nargs: Any = ("+" if required else "*") if many else (None if required else "?")
        group.add_argument(field.name, metavar=field.word, nargs=nargs, default=unset, help=text)
        return
    nargs = "+" if (many and not field.section) or several else "*" if many else None
    nargs = field.count if field.count not in (1, None) else "?" if field.is_switch and not several else nargs
    group.add_argument(
        *(f"--{name}" for name in (field.name, *field.aliases)),
        dest=field.name,
        metavar=field.kind,
        nargs=nargs,
        const="True" if nargs == "?" else None,
        default=unset,
        action="extend" if many else "store",
        help=text,
    )
    if field.is_switch:
        no = {"dest": field.name, "action": "store_const", "const": "False", "default": unset}
        group.add_argument(f"--no_{field.name}", help=unset, **no)


def _help(field: Field) -> str:
    """The text of a field, its names and its default."""
    names = f" One of {', '.join(field.choices)}." if any(name not in field.text for name in field.choices) else ""
    default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{field.text}{names}" + ("" if default in (MISSING, None, "", False) else f" (default: {default})")


def help_text(command: str, options: type[Any], extra: Collection[Field], names: Collection[str]) -> str:
    """The help of a command: the text of its options, its words and flags by section, and the names that it knows."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=100)
    words = "".join(f"{field.word} " for field in fields_of(options).values() if field.word)
    about, _, examples = (inspect.getdoc(options) or "").partition("\n\n")
    usage, about = f"klamp {command} {words}[flags]", f"{textwrap.fill(about, 100)}\n\n{examples}"
    parser = argparse.ArgumentParser(usage=usage, description=about, formatter_class=layout, add_help=False)
    parser.epilog = textwrap.fill(f"names: {', '.join(names)}", 100, break_on_hyphens=False) if names else None
    for section, part in itertools.groupby((*fields_of(options).values(), *extra), lambda field: field.section):
        group = parser.add_argument_group(section or "options")
        for field in part:
            add_field(group, field)
    return parser.format_help().rstrip()


def _spelled(argv: Sequence[str], known: Mapping[str, Field]) -> list[str]:
    """The words with underscores in their flags, and with a value for each switch that has none."""
    words = [re.sub("^--[^=]+", lambda flag: f"--{field_name(flag[0])}", word) for word in argv]
    switches = {f"--{name}": str in field.types for name, field in known.items() if field.is_switch}
    truth = (*TRUE_WORDS, *FALSE_WORDS, *NONE_WORDS)
    return [
        f"{word}=True"
        if word in switches and after.lower() not in truth and (not switches[word] or after[:1] in ("", "-"))
        else word
        for word, after in itertools.zip_longest(words, words[1:], fillvalue="")
    ]


def field_name(flag: str) -> str:
    """The name of the field (or alias, or `no_` and a switch) that a flag spells, with underscores."""
    return flag.removeprefix("--").replace("-", "_")


def unknown_key(kind: str, name: str, known: Collection[str], *, why: str, command: str) -> UnknownNameError:
    """The error for a flag or key that is unknown: klamp's name for it if another trainer has it, else the nearest.

    Args:
        kind: "flag", or "key in" a file.
        name: as it was given.
        known: every flag or key that there is; flags with their dashes.
        why: why it is none of them.
        command: whose help lists them.
    """
    dashes = "--" if name.startswith("--") else ""
    ours = f"{dashes}{ELSEWHERE.get(field_name(name), '')}"
    nearest = [ours] if ours in known else get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    fix = f"did you mean {nearest[0]}?" if nearest else f"see `{command} --help` for every name"
    return UnknownNameError(f"unknown {kind}", got=name, why=why, fix=fix)


ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("lr", "actor_lr"), "learning_rate"),
    **dict.fromkeys(("steps", "epochs", "num_train_epochs", "total_training_steps"), "max_steps"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "prompts_per_step"),
    **dict.fromkeys(("micro_batch_size", "grad_accum"), "gradient_accumulation_steps"),
    **dict.fromkeys(("n", "group_size", "n_samples_per_prompt", "rollout_n"), "num_generations"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_response_length"), "max_completion_length"),
    **dict.fromkeys(("kl", "kl_coeff", "init_kl_coef", "kl_loss_coef"), "beta"),
    **dict.fromkeys(("kl_loss_type", "kl_type"), "kl_estimator"),
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio", "eps_clip"), "epsilon"),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "pretrain"), "model"),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "train_file"), "task"),
    **dict.fromkeys(("reward_funcs", "reward_fn"), "reward"),
}
"""What other trainers call a field -> klamp's field, or the one that comes nearest to it."""
