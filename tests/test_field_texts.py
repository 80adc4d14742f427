"""What stands under a field of a dataclass is found, wherever the field was declared."""

import dataclasses
from dataclasses import dataclass

import pytest

from klamp._field_texts import field_texts
from klamp.config import KLConfig, LossConfig
from klamp.lab.config import section_classes


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


def test_a_childs_text_wins_and_ends_at_a_blank_line() -> None:
    assert field_texts(Child) == {"first": "What the base says.", "second": "What the child says in two lines."}


@pytest.mark.parametrize("cls", [KLConfig, LossConfig, *section_classes().values()])
def test_every_field_of_a_configuration_has_its_text(cls: type) -> None:
    assert field_texts(cls).keys() == {field.name for field in dataclasses.fields(cls)}


def test_what_is_no_dataclass_says_nothing() -> None:
    assert field_texts(int) == {}
