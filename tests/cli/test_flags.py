"""From argv to a command's options: words and flags in any order, and an error for whatever is neither."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from klamp.cli.flags import field_name, fields_of, read_flag, read_options, read_own, split_flags, unknown_key
from klamp.errors import ConfigError, UnknownNameError


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
