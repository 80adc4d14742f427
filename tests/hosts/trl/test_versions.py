"""The versions of TRL that klamp was tried with; every other one is refused by number."""

from __future__ import annotations

from importlib import metadata

import pytest

from klamp.errors import UnsupportedVersion
from klamp.hosts.trl.versions import check_version


def test_another_version_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.9.0", "2.0.0", "0.29.1"):
        monkeypatch.setattr(metadata, "version", lambda _, found=version: found)
        with pytest.raises(UnsupportedVersion, match=f"trl {version}"):
            check_version()
    monkeypatch.setattr(metadata, "version", lambda _: "1.10.0")
    assert check_version() == "1.10.0"


def test_a_trl_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UnsupportedVersion, match="klamp.trl needs trl"):
        check_version()
