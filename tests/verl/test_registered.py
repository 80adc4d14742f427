"""The module that verl imports in each of its processes: the import itself makes klamp's names known there."""

import importlib
import sys

import pytest

from klamp.errors import UnsupportedVersion
from klamp.hosts.verl.overrides import IMPORTED

MODULE = "klamp.verl.registered"


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def test_importing_it_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr("klamp.verl.register", lambda: calls.append(None))
    for _ in range(2):
        importlib.import_module(MODULE)
    assert len(calls) == 1


def test_without_verl_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(UnsupportedVersion, match="klamp.verl needs verl"):
        importlib.import_module(MODULE)


def test_it_is_the_module_that_the_overrides_name() -> None:
    assert IMPORTED.endswith(f"VERL_USE_EXTERNAL_MODULES={MODULE}")
