"""Which versions of a host are taken: asked of what is installed, with the range in the answer."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from klamp.errors import MissingLibrary, UnsupportedVersion
from klamp.hosts.common.versions import check_installed, out_of_range


def test_what_is_installed_is_told() -> None:
    assert check_installed("torch>=2", by="klamp", why="") == metadata.version("torch")
    assert torch.__version__.startswith(metadata.version("torch").split("+")[0])


def test_another_version_is_refused_with_the_command() -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        check_installed("torch>=99", by="klamp.host", why="its hooks move")
    error = caught.value
    assert error.what == "klamp.host needs torch>=99"
    assert error.got == f"torch {metadata.version('torch')}"
    assert (error.why, error.fix) == ("its hooks move", 'pip install "torch>=99"')


def test_a_host_that_is_not_installed_is_named() -> None:
    with pytest.raises(MissingLibrary, match="klamp.host needs no-such-host, which is not installed"):
        check_installed("no-such-host>=1,<2", by="klamp.host", why="its hooks move")


@pytest.mark.parametrize(
    ("installed", "taken"),
    [("1.9.9", False), ("1.10.0", True), ("1.10.0.dev3", False), ("1.14.2", True), ("2.0.0rc1", False), ("2.0", False)],
)
def test_both_ends_of_the_range(monkeypatch: pytest.MonkeyPatch, installed: str, taken: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    if taken:
        assert check_installed("trl>=1.10,<2", by="klamp.trl", why="") == installed
        return
    with pytest.raises(UnsupportedVersion, match=f"trl {installed}"):
        check_installed("trl>=1.10,<2", by="klamp.trl", why="")


def test_a_host_that_is_not_what_it_was_has_the_same_error() -> None:
    error = out_of_range("verl>=0.8,<0.10", by="klamp.verl", got="verl 0.9, whose hook moved", why="it is looked up")
    assert isinstance(error, ImportError) and error.got == "verl 0.9, whose hook moved"
