"""From a name to a subject: the table of hosts and their versions, `module:function`, and every way to be refused."""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from klamp.audit import HOSTS, load_subject, trainers
from klamp.audit.examine import AuditedLoss, Subject, audit
from klamp.audit.function import load_function
from klamp.cli import main
from klamp.errors import ConfigError, UnknownNameError, UnsupportedVersion

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


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (ImportError("no 'requests'"), ("fakehost 1.3.0 cannot be reached", "ImportError: no 'requests'", "complete")),
        (AttributeError("no 'beta'"), ("fakehost 1.3.0 cannot be reached", "AttributeError: no 'beta'", "complete")),
        (UnsupportedVersion("mine"), ("mine",)),
    ],
)
def test_a_host_that_cannot_be_imported_is_no_crash_and_klamps_own_errors_pass(fake, error, texts) -> None:
    def raising(*_: torch.Tensor) -> Any:
        raise error

    moved = Subject(title="fake", losses=(AuditedLoss(name="moved", compute=raising),))
    for subject in (raising, lambda: moved):
        fake(subject)
        with pytest.raises(UnsupportedVersion) as caught:
            load_subject("fake")
        assert all(text in str(caught.value) for text in texts)
        assert len(texts) > 1 or str(caught.value) == "mine"


SOURCE = """
import torch
STEP = 3
def k1(policy, ref):
    return policy - ref
class Losses:
    @staticmethod
    def k2(policy, ref):
        return (policy - ref).square() / 2
def with_mask(policy, ref, mask):
    return (policy - ref) * mask
def alone(policy):
    return policy
def mean(policy, ref):
    return (policy - ref).mean().item()
def nothing_back(policy, ref):
    policy - ref
def leaving(policy, ref):
    raise SystemExit(0)
def failing(policy, ref):
    raise RuntimeError("no such\\nbackend")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "klamp_audited_module"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "klamp_broken_module.py").write_text("1 / 0", encoding="utf-8")
    (tmp_path / "klamp_leaving_module.py").write_text("import sys; sys.exit(0)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_function_and_a_method_of_a_class_are_found(module: str) -> None:
    assert audit(load_subject(f"{module}:k1"))[f"{module}:k1"].kl == "zero"
    policy, ref = torch.tensor([3.0]), torch.tensor([1.0])
    assert load_function(f"{module}:Losses.k2")(policy, ref).tolist() == [2.0]


def k3(policy: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    return torch.expm1(ref - policy) - (ref - policy)


@pytest.mark.parametrize(
    ("term", "kl", "ok"),
    [
        (AuditedLoss(name="", compute=lambda p, q: p - q, takes="reward"), "reverse", True),
        (AuditedLoss(name="", compute=k3, takes="reward"), "k3", False),
        (AuditedLoss(name="", compute=lambda p, q, old, m: ((p - old).exp() * k3(p, q))[m].mean()), "reverse", True),
        (AuditedLoss(name="", compute=lambda p, q, old, m: k3(p, q).mean()), "forward", False),
        (AuditedLoss(name="", compute=lambda p, q, old, m: p.detach().mean()), None, None),
    ],
)
def test_a_term_of_a_trainer_is_judged_in_loss_or_reward(term: AuditedLoss, kl: str | None, ok: bool | None) -> None:
    verdict = audit(Subject(title="it", losses=(term,)))[""]
    assert (verdict.kl, verdict.ok) == (kl, ok), str(verdict)
    assert ("off-mask-gradient" in verdict.codes("wrong")) == (kl == "forward")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{}:Losses.k9", "has no attribute 'k9'"),
        ("{}:k2", "did you mean 'k1'"),
        ("{}:STEP", "is no function"),
        ("{}:", "unknown function"),
        (":k1", "cannot be imported"),
        ("klamp_no_such_module:k1", "ModuleNotFoundError"),
        ("klamp_leaving_module:k1", "SystemExit: 0"),
        ("klamp_broken_module:k1", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(module: str, path: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(path.format(module))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("function", "got"),
    [
        ("with_mask", "missing 1 required positional argument: 'mask'"),
        ("alone", "takes 1 positional argument but 2 were given"),
        ("mean", "it returned 0.046875 (float)"),
        ("nothing_back", "it returned None"),
        ("leaving", "SystemExit: 0"),
        ("failing", "RuntimeError: no such backend"),
    ],
)
def test_another_form_is_refused(module: str, function: str, got: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{module}:{function}"]) == 2
    err = capsys.readouterr().err
    assert got in err and "function(policy_logprobs [B, T], ref_logprobs [B, T]) -> [B, T]" in err
    assert "Traceback" not in err
