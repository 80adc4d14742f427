"""From argv to options: texts to values, both spellings, switches, words, the fields of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from klamp.cli import options
from klamp.cli.flags import ELSEWHERE, by_any_name, fields_of, read_argv, read_options, train_fields
from klamp.cli.help import COMMANDS
from klamp.cli.options import TrainOptions
from klamp.config import ALIASES, TEACHER_ALIASES
from klamp.errors import ConfigError, UnknownNameError
from klamp.training.config import TrainConfig, field_owners


@dataclass(frozen=True, kw_only=True)
class Words:
    """A command of words and flags."""

    path: Path = field(metadata={"word": "PATH"})
    """The first word."""
    more: tuple[str, ...] = field(default=(), metadata={"word": "MORE"})
    """All words after it."""
    quick: bool = False
    """A switch."""
    size: int = 1
    """A number."""
    names: tuple[str, ...] = ()
    """Any number of names."""


def read(*argv: str) -> Words:
    return read_options(Words, argv, command="klamp it")


def read_train(*argv: str) -> dict[str, Any]:
    return read_argv(train_fields(), argv, command="klamp train")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a"], Words(path=Path("a"))),
        (["a", "b", "c"], Words(path=Path("a"), more=("b", "c"))),
        (["--size", "3", "a", "b"], Words(path=Path("a"), more=("b",), size=3)),
        (["a", "--size=3", "b"], Words(path=Path("a"), more=("b",), size=3)),
        (["--quick", "a"], Words(path=Path("a"), quick=True)),
        (["--quick", "true", "a"], Words(path=Path("a"), quick=True)),
        (["--quick", "--no-quick", "a"], Words(path=Path("a"))),
        (["a", "--names", "x", "y"], Words(path=Path("a"), names=("x", "y"))),
        (["a", "--names", "x", "--names", "y"], Words(path=Path("a"), names=("x", "y"))),
        (["a", "--size", "1", "--size", "2"], Words(path=Path("a"), size=2)),
    ],
)
def test_words_and_flags_in_any_order(argv: list[str], expected: Words) -> None:
    assert read(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        ([], "klamp it: the following arguments are required: PATH", "klamp it --help"),
        (["--quick"], "klamp it: the following arguments are required: PATH", "klamp it --help"),
        (["a", "--siez", "3"], "unknown flag", "did you mean --size?"),
        (["a", "-s"], "unknown flag", "see `klamp it --help` for every name"),
        (["a", "--size", "many"], "--size cannot be read", "for example 1 (the default)"),
        (["a", "--size"], "--size cannot be read", "for example 1 (the default)"),
        (["a", "--path", "b"], "unknown flag", "see `klamp it --help` for every name"),
        (["a", "--no_quick=1"], "--no_quick: ignored explicit argument '1'", "klamp it --help"),
    ],
)
def test_what_cannot_be_read(argv: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert caught.value.what == what
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", sorted(train_fields()))
def test_every_field_is_a_flag_in_both_spellings_and_its_default_survives_its_own_text(name: str) -> None:
    known = train_fields()[name]
    words = [*map(str, known.default if isinstance(known.default, tuple) else (known.default,))]
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        (value,) = read_train(flag, *words).values()
        assert value == known.default and type(value) is type(known.default)


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("learning_rate", ["1e-6"], 1e-6),
        ("beta", ["1"], 1.0),
        ("target_kl", ["none"], None),
        ("scale_rewards", ["none"], "none"),
        ("scale_rewards", ["None"], None),
        ("resume", ["true"], True),
        ("resume", ["off"], False),
        ("chat_template", ["NO"], False),
        ("chat_template", ["null"], None),
        ("kl_exclude_tokens", ["1", "2"], (1, 2)),
        ("kl_exclude_tokens", ["7", "special"], (7, "special")),
        ("report_to", [], ()),
        ("kl_controller_factors", ["2", "0.5", "1", "1"], (2.0, 0.5, 1.0, 1.0)),
        ("system_prompt", ["None"], "None"),
    ],
)
def test_reading(name: str, texts: list[str], value: object) -> None:
    found = train_fields()[name].read(texts, shown=name)
    assert found == value
    assert type(found) is type(value)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One of everything."""

    names: tuple[str, ...] = field(default=(), metadata={"word": "NAME"})
    """Words,
    in two lines.

    And what the help leaves out."""
    kind: Literal["b", "a"] | None = None
    """Which."""
    count: int | None = field(default=None, metadata={"least": 2})
    """How many."""


def test_the_fields_of_a_class() -> None:
    names, kind, count = fields_of(Example, "part").values()
    assert (names.word, names.text, names.count, names.section) == ("NAME", "Words, in two lines.", None, "part")
    assert (kind.choices, kind.in_words) == (("b", "a"), "one of b, a, or None")
    assert (count.least, count.kind, count.in_words) == (2, "INT", "a whole number, or None")
    assert count.read(["none"], shown="--count") is None, "which is not too small"


@pytest.mark.parametrize(
    ("name", "texts", "what"),
    [
        ("count", ["1"], "--count takes 2 or more"),
        ("kind", ["c"], "unknown --kind"),
    ],
)
def test_too_small_or_unknown(name: str, texts: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fields_of(Example)[name].read(texts, shown=f"--{name}")
    assert caught.value.what == what


def test_the_fields_are_the_commands_own_and_those_of_the_configuration() -> None:
    configured = {name: field for name, field in train_fields().items() if field.section}
    assert {name: field.section for name, field in configured.items()} == field_owners()
    assert {name: field.default for name, field in configured.items()} == TrainConfig().flat()
    assert train_fields().keys() - configured.keys() == TrainOptions.__dataclass_fields__.keys()
    assert by_any_name(train_fields()).keys() == train_fields().keys() | ALIASES.keys() | TEACHER_ALIASES.keys()
    assert {alias: field.name for field in train_fields().values() for alias in field.aliases} == {
        **ALIASES,
        **TEACHER_ALIASES,
    }
    assert [name for name, field in train_fields().items() if len(field.text) < 10] == []


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_lead_to_their_field(alias: str) -> None:
    for flag in (f"--{alias}", f"--{alias.replace('_', '-')}"):
        assert read_train(flag, "2") == read_train(f"{flag}=2") == {ALIASES[alias]: 2.0}


def test_of_two_names_of_one_field_the_last_counts() -> None:
    assert read_train("--kl_coef", "0.1", "--beta", "0.2") == {"beta": 0.2}


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["--mask-truncated-completions"], {"mask_truncated_completions": True}),
        (["--mask_truncated_completions", "false"], {"mask_truncated_completions": False}),
        (["--mask_truncated_completions=0"], {"mask_truncated_completions": False}),
        (["--chat_template"], {"chat_template": True}),
        (["--no-chat-template"], {"chat_template": False}),
        (["--chat_template", "None"], {"chat_template": None}),
        (["--report_to", "tensorboard", "wandb"], {"report_to": ("tensorboard", "wandb")}),
        (["--report-to"], {"report_to": ()}),
        (["--system_prompt=--think"], {"system_prompt": "--think"}),
    ],
)
def test_switches_several_values_and_dashes(argv: list[str], given: dict[str, Any]) -> None:
    assert read_train(*argv, "--seed", "-1") == given | {"seed": -1}


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--max_stepz", "did you mean --max_steps?"),
        ("--kl-bets", "did you mean --kl_beta?"),
        ("--no-resumee", "did you mean --no_resume?"),
        ("--dry", "did you mean --dry_run?"),
        ("--lr", "did you mean --learning_rate?"),
        ("--qqqqqqqq", "see `klamp train --help` for every name"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, fix: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_train(flag, "1")
    assert (caught.value.got, caught.value.fix) == (flag.replace("-", "_").replace("__", "--"), fix)


def test_a_file_in_the_wrong_place_is_told_where_it_goes() -> None:
    with pytest.raises(ConfigError, match="a word that belongs to no flag") as caught:
        read_train("a.yml", "--seed", "1")
    assert "--config a.yml" in caught.value.fix


CLASSES = [each for each in vars(options).values() if dataclasses.is_dataclass(each)]


def test_every_class_belongs_to_a_command() -> None:
    assert {page.options for page in COMMANDS.values()} == set(CLASSES) - {options.PlanOptions}


def test_the_names_of_other_trainers_lead_to_fields_and_are_none() -> None:
    assert ELSEWHERE.keys() & by_any_name(train_fields()).keys() == set()
    assert set(ELSEWHERE.values()) <= train_fields().keys()


@pytest.mark.parametrize("alias", TEACHER_ALIASES)
def test_the_names_of_a_teacher_s_fields_elsewhere_are_flags(alias: str) -> None:
    assert [*read_train(f"--{alias}", "3")] == [TEACHER_ALIASES[alias]]
