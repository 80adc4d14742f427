"""The checksums of a checkpoint: every file in it, whatever is done to one is noticed, what comes later is not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from klamp.training.checkpoint import SEAL, changed, checksums, seal, sealed


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "inner" / "optimizer.pt").write_bytes(b"moments")
    return tmp_path


def test_they_are_those_of_every_file(folder):
    seal(folder)
    assert sealed(folder) == {
        "inner/optimizer.pt": hashlib.sha256(b"moments").hexdigest(),
        "model.safetensors": hashlib.sha256(b"weights").hexdigest(),
    }
    assert checksums(folder).keys() - sealed(folder).keys() == {SEAL}


@pytest.mark.parametrize("damage", [lambda f: f.write_bytes(b"Weights"), Path.unlink, lambda f: f.write_bytes(b"")])
def test_a_file_that_is_another_one_is_named(folder, damage):
    seal(folder)
    assert changed(folder, sealed(folder)) == []
    (folder / "later").touch()
    damage(folder / "model.safetensors")
    assert changed(folder, sealed(folder)) == ["model.safetensors"]


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_a_seal_that_cannot_be_read_is_none(folder, text):
    if text is not None:
        (folder / SEAL).write_text(text)
    with pytest.raises((OSError, ValueError)):
        sealed(folder)


def test_what_is_sealed_is_as_readable_as_the_seal(folder):
    (folder / "model.safetensors").chmod(0o600)  # as safetensors writes it
    seal(folder)
    assert {path.stat().st_mode for path in folder.rglob("*") if path.is_file()} == {(folder / SEAL).stat().st_mode}
