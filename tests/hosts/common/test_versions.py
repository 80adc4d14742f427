"""Which versions of a host are taken: asked on use, never on import, and the range is in the answer."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from klamp.errors import MissingLibrary, UnsupportedVersion
from klamp.hosts.common.versions import TRIED, check_version, load_tinker, told_version


@pytest.mark.parametrize(
    ("host", "installed", "taken"),
    [
        ("trl", "1.9.9", False),
        ("trl", "1.10.0", True),
        ("trl", "1.10.0.dev3", False),
        ("trl", "2.0.0rc1", False),
        ("trl", "2.0", False),
        ("tinker", "0.24.9", False),
        ("tinker", "0.25", True),
        ("tinker", "0.38.9rc1", True),
        ("tinker", "0.39.0rc1", False),
        ("verl", "0.7.1", False),
        ("verl", "0.8.0", True),
        ("verl", "0.10.0", False),
        ("unsloth", "2026.10.6", False),
        ("unsloth", "2026.10.7", True),
        ("unsloth_zoo", "2026.10.10", False),
    ],
)
def test_both_ends_of_the_range(monkeypatch: pytest.MonkeyPatch, host: str, installed: str, taken: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    if taken:
        assert check_version(host) == installed
        return
    with pytest.raises(UnsupportedVersion) as caught:
        check_version(host)
    needed, by, why = TRIED[host]
    error = caught.value
    assert (error.what, error.got) == (f"{by} needs {needed}", f"{host} {installed}")
    assert (error.why, error.fix) == (why, f'pip install "{needed}"')


def test_a_host_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingLibrary, match="klamp.trl needs trl, which is not installed"):
        check_version("trl")
    with pytest.raises(UnsupportedVersion, match="not installed"):
        load_tinker.__wrapped__()
    assert told_version("verl") == "verl, not installed here"


@pytest.mark.parametrize("host", ["trl", "tinker"])
def test_the_range_is_the_one_that_the_package_declares(host: str) -> None:
    wanted = [Requirement(line) for line in metadata.requires("klamp") or []]
    declared = {str(each.specifier) for each in wanted if each.name == host}
    assert declared == {str(Requirement(TRIED[host].needed).specifier)}


def test_importing_needs_no_sdk_and_the_loss_neither() -> None:
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
