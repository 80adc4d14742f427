"""The exceptions: one root, texts of four parts; and the texts under the fields of a dataclass."""

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest

from klamp import errors
from klamp._field_texts import field_texts
from klamp.config import KLConfig, LossConfig
from klamp.errors import ConfigError, KlampError, Refusal, UnsupportedVersion, missing_library, refuse, unknown_name
from klamp.lab.config import section_classes

CLASSES = [
    x for _, x in inspect.getmembers(errors, inspect.isclass) if issubclass(x, KlampError) and x is not KlampError
]


def test_a_text_has_its_parts_in_one_order_and_leaves_out_what_is_not_there():
    whole = ConfigError("it is wrong", got=3, why="since", fix="do this")
    assert str(whole) == "it is wrong\n  got: 3\n  why: since\n  fix: do this"
    assert str(ConfigError("it is wrong")) == "it is wrong"
    assert str(ConfigError("it is wrong", got=0)) == "it is wrong\n  got: 0", "0 is a value like any other"
    long = ConfigError("it is wrong", got=["9" * 10_000])
    assert str(long) == f"it is wrong\n  got: ['{'9' * 998}..." and len(long.got[0]) == 10_000


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_klamps_and_one_of_the_standard_library(cls):
    standard = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    assert standard[0] not in (Exception, BaseException, object), "a user may catch it without klamp's names"


def test_the_first_row_that_applies_is_raised_and_no_other():
    rows = [Refusal(i in (2, 3), f"row {i}", why=f"why {i}", fix=f"fix {i}", got=i) for i in range(5)]
    with pytest.raises(ConfigError) as caught:
        refuse(rows)
    assert str(caught.value) == "row 2\n  got: 2\n  why: why 2\n  fix: fix 2"
    refuse(rows[:2])
    refuse([])


def test_an_unknown_name_is_told_the_nearest_known_one_or_all_of_them():
    near, far = unknown_name("fruit", "aple", ["apple", "pear"]), unknown_name("fruit", "xyz", ["apple", "pear"])
    assert isinstance(near, errors.UnknownNameError) and near.fix == "did you mean 'apple'?"
    assert far.fix == "choose one of: apple, pear"


CLONE = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("library", "extra"), [("math_verify", "train"), ("Math-Verify", "train"), ("trl", "trl")])
def test_a_missing_library_is_told_with_the_extra_that_brings_it(library: str, extra: str):
    told = missing_library(library, by="this", instead="or do without")
    assert isinstance(told, UnsupportedVersion) and told.what == f"this needs {library}, which is not installed"
    assert told.fix == f"pip install -e '{CLONE}[{extra}]', or do without", "a wheel says 'klamp[...]': tests/packaging"


@pytest.mark.parametrize("library", ["pytest", "torch", "nobody-declares-this"])
def test_what_no_extra_of_users_brings_is_to_be_installed_by_itself(library: str):
    assert missing_library(library, by="this").fix == f"pip install {library}"


@dataclass
class Base:
    first: int = 0
    """What the base says."""
    second: int = 0
    """What the base says of the second."""


@dataclass
class Child(Base):
    second: int = 1
    """What the child says
    in two lines.

    The second paragraph is for readers of the source."""
    silent: int = 2


def test_a_childs_text_wins_and_ends_at_a_blank_line_and_what_is_no_dataclass_has_none() -> None:
    assert field_texts(int) == {}
    assert field_texts(Child) == {"first": "What the base says.", "second": "What the child says in two lines."}


@pytest.mark.parametrize("cls", [KLConfig, LossConfig, *section_classes().values()])
def test_every_field_of_a_configuration_has_its_text(cls: type) -> None:
    assert field_texts(cls).keys() == {field.name for field in dataclasses.fields(cls)}
