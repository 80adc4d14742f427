"""Losses of checkouts: definitions cut from a file, modules that are not there, what is said of a missing folder."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from scripts.checkouts import cut, package, stub, undecorated

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
