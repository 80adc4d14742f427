"""The lock agrees with the pins, every licence is allowed; losses are cut from files of other trainers."""

import importlib
import re
import sys
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripts import supply_chain
from scripts.checkouts import cut, package, stub, undecorated
from scripts.supply_chain import CONSTRAINTS, EXEMPT, LOCK, by_hand, installed, licence_of, pins, refused, text

PINNED = pins(CONSTRAINTS.read_text(encoding="utf-8"))


def test_the_lock_has_the_pins_version_by_version_with_hashes() -> None:
    content = LOCK.read_text(encoding="utf-8")
    locked, lines = pins(content), [line for line in content.splitlines() if line and not line.startswith("#")]
    assert locked == {name: version for name, version in PINNED.items() if name not in EXEMPT}, "run: make lock"
    assert PINNED.keys() >= EXEMPT.keys() and len(lines) == len(locked) > 100
    assert all(re.fullmatch(r"[\w.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_every_licence_that_is_installed_is_allowed() -> None:
    found = installed()
    assert refused(found) == {} and len(found) > 100
    assert found["numpy"][1].startswith("BSD-3-Clause") and found["torchrl"][1] == "MIT"
    assert text(found).count("| codespell |") == 1


def test_what_was_decided_by_hand_is_needed_has_a_reason_and_is_on_the_page() -> None:
    page = supply_chain.PAGE.read_text(encoding="utf-8")
    for name, entry in by_hand().items():
        assert f"| {name} | {entry['licence']} | {entry['why']} |" in page
        assert len(entry["why"].split()) > 4 and name in PINNED


@pytest.mark.parametrize(
    ("fields", "licence", "allowed"),
    [
        ({"License-Expression": "MPL-2.0 AND (Apache-2.0 OR MIT)"}, "MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ({"License-Expression": "MIT OR GPL-3.0-only", "License": "MIT"}, "MIT OR GPL-3.0-only", False),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0", True),
        ({"License": "see the file", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD", True),
        ({"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"}, "GNU Affero", False),
        ({}, "", False),
    ],
)
def test_a_licence_is_what_the_metadata_says(fields: dict[str, str], licence: str, allowed: bool) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    found = licence_of(SimpleNamespace(metadata=metadata))  # type: ignore[arg-type]
    assert found.startswith(licence)
    assert (refused({"some": ("1.0", found)}) == {}) == allowed


FILE = '''
import torch

from far.away import Batch, Thing, decorate

@decorate(fast=True)
def loss(batch: Batch[int] | Thing) -> Thing:
    """Its own."""
    return scale * torch.ones(2).sum()

class Trainer(Thing):
    def step(self, x):
        return loss(None) + x
'''


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "losses.py").write_text(FILE, encoding="utf-8")
    (tmp_path / "__init__.py").write_text("raise RuntimeError('the whole package')", encoding="utf-8")
    for name in ("far", "far.away", "tiny_host", "tiny_host.losses"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that they are taken away again
        del sys.modules[name]
    return tmp_path


def test_a_definition_is_cut_from_its_file_and_runs_unchanged(tiny: Path) -> None:
    found = cut(tiny / "losses.py", "loss", "Trainer.step", decorate=undecorated, scale=3)
    assert found.loss.__doc__ == "Its own." and found.loss(None) == 6
    assert found.step(None, torch.ones(())) == 7
    with pytest.raises(LookupError, match=r"losses.py has no Trainer.moved"):
        cut(tiny / "losses.py", "Trainer.moved")


def test_a_file_is_imported_without_its_package_and_without_what_it_does_not_use(tiny: Path) -> None:
    package("tiny_host", tiny)
    stub("far")
    stub("far.away", decorate=undecorated)
    module = importlib.import_module("tiny_host.losses")
    module.scale = 2
    assert module.Trainer().step(1) == 5
