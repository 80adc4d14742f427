"""The range of the SDK: refused on use, never on import."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from klamp.errors import UnsupportedVersion
from klamp.hosts.tinker import versions as version


@pytest.mark.parametrize("installed", ["0.25.0", "0.25", "0.31.2", "0.38.0", "0.38.9rc1"])
def test_versions_of_the_range(installed):
    version.check_version(installed)


@pytest.mark.parametrize("installed", ["0.24.9", "0.39.0", "0.39.0rc1", "1.0.0", "0.3.0"])
def test_versions_outside(installed):
    with pytest.raises(UnsupportedVersion, match=r"tinker>=0\.25,<0\.39"):
        version.check_version(installed)


def test_a_missing_sdk_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    with pytest.raises(UnsupportedVersion, match="not installed"):
        version.load_tinker.__wrapped__()


def test_the_range_is_the_one_that_the_package_declares():
    wanted = [Requirement(line) for line in importlib.metadata.requires("klamp")]
    (declared,) = [each.specifier for each in wanted if each.name == "tinker"]
    assert declared == Requirement(version.RANGE).specifier


def test_importing_needs_no_sdk_and_the_loss_neither():
    code = """
import sys
sys.modules["tinker"] = None
import torch
from types import SimpleNamespace
from klamp.tinker import build_datum, compute_grpo_kl_loss
rows = {"target_tokens": torch.tensor([1, 2]), "advantages": torch.ones(2), "logprobs": -torch.ones(2)}
rows["ref_logprobs"] = rows["logprobs"]
loss, _ = compute_grpo_kl_loss([SimpleNamespace(loss_fn_inputs=rows)], [-torch.ones(2)])
print(loss.item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "-1.0"
