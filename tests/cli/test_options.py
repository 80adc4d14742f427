"""The options of every command: what their metadata may say, and that each can be built, read and explained."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from klamp.ablation.plan import OWNED
from klamp.cli import options
from klamp.cli.flags import fields_of
from klamp.cli.help import PAGES

CLASSES = [each for each in vars(options).values() if dataclasses.is_dataclass(each)]


def test_every_class_belongs_to_a_command() -> None:
    assert {page.options for page in PAGES.values()} == set(CLASSES) - {options.RunOptions}
    assert all(issubclass(PAGES[command].options, options.RunOptions) for command in ("train", "ablate"))


@pytest.mark.parametrize("cls", CLASSES)
def test_metadata_says_only_what_is_understood(cls: Any) -> None:
    assert {key for field in dataclasses.fields(cls) for key in field.metadata} <= {"word", "least", "bare"}


@pytest.mark.parametrize("cls", CLASSES)
def test_a_word_is_named_in_capitals_and_flags_that_must_be_given_are_words(cls: Any) -> None:
    for field in fields_of(cls).values():
        assert field.word == field.word.upper()
        assert field.word or field.default is not dataclasses.MISSING


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_are_as_large_as_they_must_be(cls: Any) -> None:
    for field in fields_of(cls).values():
        if field.least is not None and isinstance(field.default, int | float):
            assert field.default >= field.least


def test_the_names_are_those_of_the_tables() -> None:
    assert set(PAGES["ablate"].hidden) == OWNED.keys()
