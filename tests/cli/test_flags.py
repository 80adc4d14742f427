"""From argv to options: texts to values, both spellings, switches, words, the fields of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from klamp.ablation.plan import OWNED
from klamp.cli import options
from klamp.cli.flags import (
    field_name,
    fields_of,
    read_flag,
    read_options,
    read_own,
    read_value,
    split_flags,
    unknown_key,
)
from klamp.cli.help import PAGES
from klamp.cli.options import TrainOptions
from klamp.cli.train_fields import every_flag, fields, fields_by_any_name, read_flags
from klamp.config import ALIASES, PRESETS
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
    ray: str | None = field(default=None, metadata={"bare": "here"})
    """A flag that may stand alone."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A command of flags only."""

    size: int = 1
    """A number."""


def read(*argv: str) -> Words:
    return read_options(Words, argv, command="klamp it")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["a"], Words(path=Path("a"))),
        (["a", "b", "c"], Words(path=Path("a"), more=("b", "c"))),
        (["--size", "3", "a", "b"], Words(path=Path("a"), more=("b",), size=3)),
        (["a", "--size=3", "b"], Words(path=Path("a"), more=("b",), size=3)),
        (["--quick", "a"], Words(path=Path("a"), quick=True)),
        (["--quick", "true", "a"], Words(path=Path("a"), quick=True)),
        (["--no-quick", "a"], Words(path=Path("a"))),
        (["a", "--names", "x", "y"], Words(path=Path("a"), names=("x", "y"))),
        (["a", "--names", "x", "--names", "y"], Words(path=Path("a"), names=("x", "y"))),
        (["a", "--size", "1", "--size", "2"], Words(path=Path("a"), size=2)),
        (["a", "--ray"], Words(path=Path("a"), ray="here")),
        (["--ray", "there", "a"], Words(path=Path("a"), ray="there")),
    ],
)
def test_words_and_flags_in_any_order(argv: list[str], expected: Words) -> None:
    assert read(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        ([], "PATH is missing", "klamp it PATH [flags]"),
        (["--quick"], "PATH is missing", "klamp it PATH [flags]"),
        (["a", "--siez", "3"], "unknown flag", "did you mean --size?"),
        (["a", "--xyzzy"], "unknown flag", "see `klamp it --help` for every name"),
        (["a", "-s"], "unknown flag", "see `klamp it --help` for every name"),
        (["a", "--size", "many"], "--size cannot be read", "for example 1 (the default)"),
        (["a", "--size"], "--size cannot be read", "for example 1 (the default)"),
        (["a", "--no_size"], "unknown flag", "did you mean --size?"),
        (["a", "--path", "b"], "unknown flag", "see `klamp it --help` for every name"),
    ],
)
def test_what_cannot_be_read(argv: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert (caught.value.what, caught.value.fix) == (what, fix)


def test_an_off_switch_hands_its_word_on_only_where_the_command_has_words() -> None:
    with pytest.raises(ConfigError, match="a word that belongs to no flag"):
        read_options(Flags, ["a", "--size", "3"], command="klamp it")
    with pytest.raises(ConfigError, match="--size cannot be read"):
        read_options(Flags, ["--size", "3", "4"], command="klamp it")


def test_flags_of_others_are_left_as_they_stand() -> None:
    argv = ["--beta", "0", "1", "--size", "3", "--no-cpu"]
    given, left = read_own(fields_of(Flags), argv, command="klamp it", others={"--beta", "--no_cpu"})
    assert (given, left) == ({"size": 3}, [("--beta", ["0", "1"]), ("--no-cpu", [])])
    with pytest.raises(UnknownNameError) as caught:
        read_own(fields_of(Flags), ["--betta", "1"], command="klamp it", others={"--beta"})
    assert caught.value.fix == "did you mean --beta?"


def test_splitting_keeps_order_and_words() -> None:
    groups = split_flags(["--a", "1", "2", "--b=x=y", "--c"], command="klamp it")
    assert groups == [("--a", ["1", "2"]), ("--b", ["x=y"]), ("--c", [])]
    assert field_name("--no-cpu") == "no_cpu"


@pytest.mark.parametrize(
    ("command", "fix"), [("klamp train", "--config a.yml"), ("klamp ablate", "klamp ablate --plan a.yml")]
)
def test_a_file_in_the_wrong_place_is_told_where_it_goes(command: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_flags(["a.yml"], command=command)
    assert caught.value.fix == fix


def test_a_flag_that_nothing_is_called_by_is_none() -> None:
    assert read_flag("--beta", ["1"], fields_of(Flags)) is None
    assert read_flag("--size", ["2"], fields_of(Flags)) == ("size", 2)


def test_what_others_call_it_comes_before_what_looks_like_it() -> None:
    known = {"--learning_rate", "--lora_r"}
    error = unknown_key("flag", "--lr", known, why="", command="klamp train")
    assert error.fix == "did you mean --learning_rate?"
    assert (
        unknown_key("key", "lr", {"learning_rate"}, why="", command="klamp train").fix == "did you mean learning_rate?"
    )
    assert unknown_key("flag", "--lr", {"--size"}, why="none", command="klamp it").why == "none", (
        "no field of this command"
    )


def texts_of(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, tuple) else [str(value)]


@pytest.mark.parametrize("name", sorted(fields()))
def test_every_default_survives_its_own_text(name: str) -> None:
    field = fields()[name]
    value = read_value(field, texts_of(field.default), shown=name)
    assert value == field.default
    assert type(value) is type(field.default)


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("max_steps", ["500"], 500),
        ("learning_rate", ["1e-6"], 1e-6),
        ("beta", ["1"], 1.0),
        ("target_kl", ["none"], None),
        ("target_kl", ["null"], None),
        ("target_kl", ["0.05"], 0.05),
        ("scale_rewards", ["none"], "none"),
        ("scale_rewards", ["None"], None),
        ("resume", ["true"], True),
        ("resume", ["off"], False),
        ("chat_template", ["NO"], False),
        ("chat_template", ["null"], None),
        ("kl_exclude_tokens", ["1", "2"], (1, 2)),
        ("kl_exclude_tokens", ["7", "special"], (7, "special")),
        ("report_to", [], ()),
        ("kl_controller_gains", ["1", "2", "3"], (1.0, 2.0, 3.0)),
        ("system_prompt", ["None"], "None"),
    ],
)
def test_reading(name: str, texts: list[str], value: object) -> None:
    found = read_value(fields()[name], texts, shown=name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "texts", "words"),
    [
        ("max_steps", ["abc"], "a whole number"),
        ("max_steps", ["1.5"], "a whole number"),
        ("max_steps", ["True"], "a whole number"),
        ("max_steps", [], "a whole number"),
        ("max_steps", ["1", "2"], "a whole number"),
        ("beta", ["high"], "a number"),
        ("target_kl", ["low"], "a number, or None"),
        ("resume", ["maybe"], "true or false"),
        ("chat_template", ["maybe"], "true or false, or None"),
        ("kl_controller_gains", ["1", "2"], "3 values, each a number"),
    ],
)
def test_text_of_the_wrong_type_says_what_the_field_takes(name: str, texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_value(fields()[name], texts, shown=f"--{name}")
    assert caught.value.what == f"--{name} cannot be read"
    assert caught.value.why == f"it takes {words}"
    assert all(text in caught.value.got for text in texts)


def test_every_field_says_in_words_what_it_takes() -> None:
    assert fields()["kl_exclude_tokens"].in_words == "any number of values, each a whole number or a text"
    assert fields()["kl_estimator"].in_words == "one of k1, k2, k3, abs, exact"
    assert [name for name, field in fields().items() if any(sign in field.in_words for sign in "[]{}|")] == []


def test_an_unknown_choice_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_value(fields()["kl_placement"], ["lose"], shown="--kl_placement")
    assert "'loss'" in caught.value.fix


@dataclass(frozen=True, kw_only=True)
class Base:
    """A class of options that others build on."""

    path: Path
    """Where it is."""


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    """One of everything."""

    names: tuple[str, ...] = field(default=(), metadata={"word": "NAME", "least": 1})
    """Words,
    in two lines.

    And what the help leaves out."""
    kind: Literal["b", "a"] | None = None
    """Which."""
    count: int | None = field(default=None, metadata={"least": 2, "bare": 7})
    """How many."""


def test_the_fields_of_a_class_and_of_its_base() -> None:
    path, names, kind, count = fields_of(Example, "part").values()
    assert (path.default, path.text, path.kind, path.section) == (MISSING, "Where it is.", "PATH", "part")
    assert (names.word, names.text, names.count, names.takes_none) == ("NAME", "Words, in two lines.", None, False)
    assert (kind.choices, kind.takes_none, kind.in_words) == (("b", "a"), True, "one of b, a, or None")
    assert (count.least, count.bare, count.kind, count.in_words) == (2, 7, "INT", "a whole number, or None")


def test_a_class_whose_fields_say_nothing_is_refused() -> None:
    @dataclass
    class Silent:
        beta: float = 1.0

    with pytest.raises(KeyError):
        fields_of(Silent)


@pytest.mark.parametrize(
    ("name", "texts", "what"),
    [
        ("count", ["1"], "--count takes 2 or more"),
        ("names", [], "--names takes 1 or more values"),
        ("kind", ["c"], "unknown --kind"),
    ],
)
def test_too_small_too_few_or_unknown(name: str, texts: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_value(fields_of(Example)[name], texts, shown=f"--{name}")
    assert caught.value.what == what


def test_none_is_not_too_small() -> None:
    assert read_value(fields_of(Example)["count"], ["none"], shown="--count") is None


@pytest.mark.parametrize(("name", "fix"), [("kl_warmup_steps", "for example 0 (the default)"), ("target_kl", "")])
def test_a_default_serves_as_the_example(name: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_value(fields()[name], ["much"], shown=name)
    assert caught.value.fix == fix


def test_the_fields_are_the_commands_own_and_those_of_the_configuration() -> None:
    configured = {name: field for name, field in fields().items() if field.section}
    assert {name: field.section for name, field in configured.items()} == field_owners()
    assert {name: field.default for name, field in configured.items()} == TrainConfig().flat()
    assert fields().keys() - configured.keys() == TrainOptions.__dataclass_fields__.keys()
    assert fields()["preset"].suggested == tuple(PRESETS)
    assert fields_by_any_name().keys() == fields().keys() | ALIASES.keys()
    assert {alias: field.name for field in fields().values() for alias in field.aliases} == ALIASES


def test_every_field_says_what_it_is() -> None:
    assert [name for name, field in fields().items() if len(field.text) < 10] == []


def test_every_flag_is_there() -> None:
    assert {"--beta", "--kl_coef", "--resume", "--no_resume", "--help", "--dry_run"} <= every_flag()
    assert "--no_beta" not in every_flag()


@pytest.mark.parametrize("name", sorted(fields()))
def test_every_field_is_a_flag_in_both_spellings(name: str) -> None:
    field = fields()[name]
    words = [str(each) for each in field.default] if isinstance(field.default, tuple) else [str(field.default)]
    for flag in (f"--{name}", f"--{name.replace('_', '-')}"):
        assert read_flags([flag, *words]) == {name: field.default}


@pytest.mark.parametrize("alias", ["kl-beta", "kl_beta", "kl_coef", "kl-coef", "kl_penalty", "kl-penalty"])
def test_aliases_lead_to_their_field(alias: str) -> None:
    assert read_flags([f"--{alias}", "0.25"]) == {"beta": 0.25}
    assert read_flags([f"--{alias}=0.25"]) == {"beta": 0.25}


def test_every_alias_of_the_configuration_is_a_flag() -> None:
    assert {name: read_flags([f"--{name}", "2"]) for name in ALIASES} == {
        name: {target: 2.0} for name, target in ALIASES.items()
    }


def test_two_names_of_one_field_must_agree() -> None:
    assert read_flags(["--kl_coef", "0.1", "--beta", "0.10"]) == {"beta": 0.1}
    with pytest.raises(ConfigError, match=r"beta is given twice") as caught:
        read_flags(["--kl_coef", "0.1", "--kl-penalty", "0.2"])
    assert caught.value.got == "0.1 and 0.2"


def test_a_flag_that_is_repeated_counts_as_it_stands_last() -> None:
    assert read_flags(["--beta", "0.1", "--beta", "0.2"]) == {"beta": 0.2}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--mask-truncated-completions"], True),
        (["--no-mask-truncated-completions"], False),
        (["--no_mask_truncated_completions"], False),
        (["--mask_truncated_completions", "True"], True),
        (["--mask_truncated_completions", "false"], False),
        (["--mask_truncated_completions=0"], False),
    ],
)
def test_switches_with_and_without_a_value(argv: list[str], value: bool) -> None:
    assert read_flags([*argv, "--seed", "3"]) == {"mask_truncated_completions": value, "seed": 3}


def test_a_switch_that_may_be_none_is_a_switch_all_the_same() -> None:
    assert read_flags(["--chat_template"]) == {"chat_template": True}
    assert read_flags(["--no-chat-template"]) == {"chat_template": False}
    assert read_flags(["--chat_template", "None"]) == {"chat_template": None}


def test_several_values_end_where_the_next_flag_begins() -> None:
    found = read_flags(["--report_to", "tensorboard", "wandb", "--kl_exclude_tokens", "1", "2", "--report-to"])
    assert found == {"report_to": (), "kl_exclude_tokens": (1, 2)}


def test_negative_numbers_and_values_with_dashes_are_values() -> None:
    assert read_flags(["--seed", "-1", "--system_prompt=--think"]) == {"seed": -1, "system_prompt": "--think"}


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--max_stepz", "--max_steps"),
        ("--learning-rte", "--learning_rate"),
        ("--kl-bets", "--kl_beta"),
        ("--no-resumee", "--no_resume"),
        ("--dry", "--dry_run"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_flags([flag, "1"])
    assert (caught.value.got, caught.value.fix) == (flag, f"did you mean {nearest}?")


def test_a_flag_like_no_other_points_to_the_help() -> None:
    with pytest.raises(UnknownNameError) as caught:
        read_flags(["--qqqqqqqq"])
    assert "klamp train --help" in caught.value.fix


def test_only_switches_have_an_opposite() -> None:
    with pytest.raises(UnknownNameError):
        read_flags(["--no-seed"])
    with pytest.raises(ConfigError, match="takes no value"):
        read_flags(["--no-resume", "True"])


def test_a_word_that_belongs_to_no_flag_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(["config.yaml", "--seed", "1"])
    assert caught.value.fix == "--config config.yaml"


CLASSES = [each for each in vars(options).values() if dataclasses.is_dataclass(each)]


def test_every_class_belongs_to_a_command() -> None:
    assert {page.options for page in PAGES.values()} == set(CLASSES) - {options.RunOptions}
    assert all(issubclass(PAGES[command].options, options.RunOptions) for command in ("train", "ablate"))


@pytest.mark.parametrize("cls", CLASSES)
def test_metadata_says_only_what_is_understood(cls: Any) -> None:
    assert {key for field in dataclasses.fields(cls) for key in field.metadata} <= {"word", "least", "bare"}


@pytest.mark.parametrize("cls", CLASSES)
def test_a_word_is_named_in_capitals_and_flags_that_must_be_given_are_words(cls: Any) -> None:
    for known in fields_of(cls).values():
        assert known.word == known.word.upper()
        assert known.word or known.default is not dataclasses.MISSING


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_as_large_as_they_must_be(cls: Any) -> None:
    for known in fields_of(cls).values():
        if known.least is not None and isinstance(known.default, int | float):
            assert known.default >= known.least


def test_the_names_are_those_of_the_tables() -> None:
    assert set(PAGES["ablate"].hidden) == OWNED.keys()
