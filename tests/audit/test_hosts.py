"""From a name to a subject: the table, versions, and every way in which a host may not be there."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from klamp.audit import HOSTS, load_subject, trainers
from klamp.audit.examine import AuditedLoss, Subject
from klamp.errors import UnknownNameError, UnsupportedVersion

FAKE = "fakehost>=1.2.0,<=1.10.1"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a host into the table, with this version and this way of finding its KL."""

    def install(subject: Callable[[], Subject], version: str = "1.3.0") -> None:
        monkeypatch.setattr(trainers, "fake", subject, raising=False)
        monkeypatch.setitem(HOSTS, "fake", FAKE)
        monkeypatch.setattr("klamp.audit.version", lambda package: version)

    return install


def k2_subject() -> Subject:
    loss = AuditedLoss(name="k2", compute=lambda p, ref, old, mask: (p - ref).square().mean())
    return Subject(title="fake", losses=(loss,))


@pytest.mark.parametrize("name", ["trl", "verl", "liger", "torchrl"])
def test_a_host_that_is_not_installed_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("klamp.audit.version", not_installed)
    with pytest.raises(UnsupportedVersion, match="is not installed") as caught:
        load_subject(name)
    assert f'pip install "{HOSTS[name]}"' in str(caught.value)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'trl'") as caught:
        load_subject("tlr")
    assert "module:function" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "tried"),
    [("1.2.0", True), ("1.3", True), ("1.10.1", True), ("1.1.9", False), ("1.10.2", False), ("2.0.0rc1", False)],
)
def test_versions_that_were_never_tried_are_told(fake, version: str, tried: bool) -> None:
    fake(k2_subject, version)
    cautions = load_subject("fake").cautions
    told = (f"fakehost {version} was never tried: the audit is known to read {FAKE} rightly",)
    assert cautions == (() if tried else told)


def test_a_host_that_cannot_be_imported_is_no_crash(fake) -> None:
    def subject() -> Subject:
        raise ImportError("No module named 'requests'")

    fake(subject)
    with pytest.raises(UnsupportedVersion, match="the KL of fakehost 1.3.0 cannot be reached") as caught:
        load_subject("fake")
    assert "ImportError: No module named 'requests'" in str(caught.value)
    assert "complete with dependencies" in str(caught.value)


def test_a_host_whose_kl_has_moved_is_found_out_before_the_audit(fake) -> None:
    def moved(*_: torch.Tensor) -> torch.Tensor:
        raise AttributeError("'Trainer' object has no attribute 'beta'")

    fake(lambda: Subject(title="fake", losses=(AuditedLoss(name="moved", compute=moved),)))
    with pytest.raises(UnsupportedVersion, match="has no attribute 'beta'"):
        load_subject("fake")


def test_klamps_own_errors_pass_through(fake) -> None:
    def subject() -> Subject:
        raise UnsupportedVersion("mine")

    fake(subject)
    with pytest.raises(UnsupportedVersion, match="^mine$"):
        load_subject("fake")


def test_the_table_imports_no_host() -> None:
    code = "import sys, klamp.audit; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"trl", "verl", "liger_kernel", "torchrl", "transformers"} & set(done.stdout.split())
