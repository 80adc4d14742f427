"""The name that the stand-in is imported by."""

import importlib
import sys

import pytest

import klamp_standin
from klamp.errors import MissingLibrary


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """`klamp.tinker.testing` is imported anew."""
    monkeypatch.delitem(sys.modules, "klamp.tinker.testing", raising=False)
    return monkeypatch


def test_its_names_are_those_of_the_distribution(unloaded: pytest.MonkeyPatch) -> None:
    door = importlib.import_module("klamp.tinker.testing")
    assert door.__all__ == klamp_standin.__all__
    assert all(getattr(door, name) is getattr(klamp_standin, name) for name in door.__all__)


def test_where_it_is_not_installed_the_error_says_what_brings_it(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setitem(sys.modules, "klamp_standin", None)
    with pytest.raises(MissingLibrary, match="klamp.tinker.testing needs klamp-standin") as told:
        importlib.import_module("klamp.tinker.testing")
    assert told.value.fix == "pip install klamp-standin, or in a checkout of klamp: pip install ./standin"


def test_what_the_stand_in_itself_lacks_is_named_by_python(unloaded: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "klamp_standin"]:
        unloaded.delitem(sys.modules, name)
    unloaded.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match="peft"):
        importlib.import_module("klamp.tinker.testing")
