"""Every field can be read from text, by the same rules for flags and files."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from klamp.cli.flags import fields_of, read_value
from klamp.cli.train_fields import fields
from klamp.errors import ConfigError, UnknownNameError


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
