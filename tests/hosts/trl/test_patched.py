"""Whether TRL's classes are its own: told by the name of a base class, whatever a user derives from it."""

from __future__ import annotations

import pytest
import trl

from klamp.errors import ConfigError
from klamp.hosts.trl.patched import UNSLOTH, host_class, refuse_classes


def unsloths() -> type:
    """A class of the name that Unsloth gives its own."""
    return type(UNSLOTH, (), {})


def test_unsloths_class_is_found_among_the_bases() -> None:
    theirs = unsloths()
    assert host_class(theirs) is theirs
    assert host_class(type("Mine", (theirs,), {})) is theirs
    assert host_class(trl.GRPOTrainer) is None
    assert host_class(object) is None


def test_klamps_own_classes_are_refused_once_trl_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_classes()
    monkeypatch.setattr(trl, "GRPOTrainer", type("UnslothGRPOTrainer", (unsloths(),), {}))
    with pytest.raises(ConfigError, match="cannot be used once Unsloth has patched TRL") as caught:
        refuse_classes()
    assert caught.value.got == "trl.GRPOTrainer is UnslothGRPOTrainer"
    assert "klamp.trl.attach(trainer, KLConfig(...))" in caught.value.fix
