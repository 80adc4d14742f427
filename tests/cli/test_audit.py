"""`klamp audit`: functions of a module in the working directory, hosts that are not there, rows of the table."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torch import Tensor

from klamp.audit.examine import AuditedLoss, Subject, audit
from klamp.cli import main
from klamp.cli.audit import HEADINGS, LEGEND, show_audit
from klamp.cli.commands import AuditOptions
from klamp.core.types import Direction

SOURCE = """
import torch
def k1(policy, ref):
    return policy - ref
def minus_k1(policy, ref):
    return ref - policy
def clamped_k3(policy, ref):
    x = (ref - policy).clamp(-2.0, 2.0)
    return torch.exp(x) - x - 1
def detached(policy, ref):
    return (policy.detach() - ref).square() / 2
def k2(policy, ref):
    return (policy - ref).square() / 2
def k3(policy, ref):
    return torch.expm1(ref - policy) - (ref - policy)
def odd(policy, ref):
    return torch.sin(7 * (policy - ref)) + (policy - ref) ** 3
def total(policy, ref):
    return (policy - ref).sum()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "klamp_my_kl.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "klamp_my_kl", raising=False)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["klamp_my_kl:k2"], 0, "klamp check: sound"),
        (["klamp_my_kl:k1"], 1, "klamp check: WRONG"),
        (["klamp_my_kl:k3"], 1, "KL(ref||policy)"),
        (["klamp_my_kl:k3", "--means", "forward"], 0, "klamp check: sound"),
        (["klamp_my_kl:k2", "klamp_my_kl:k1"], 1, "klamp check: WRONG"),
        (["klamp_my_kl:minus_k1"], 1, "its sign is wrong, too"),
        (["klamp_my_kl:clamped_k3"], 1, "kl"),
        (["klamp_my_kl:detached"], 1, "detached"),
        (["klamp_my_kl:total"], 1, "zero on average"),
        (["klamp_my_kl:odd"], 3, "cannot tell"),
        (["klamp_my_kl:k9"], 2, "did you mean"),
        (["tlr"], 2, "did you mean 'trl'"),
    ],
)
def test_a_functions_verdict(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *argv]) == code
    out, err = capsys.readouterr()
    assert text in (err if code == 2 else out)


def test_a_row_for_each_loss_and_each_finding_once(capsys: pytest.CaptureFixture[str]) -> None:
    def token_mean(kl: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda policy, ref, old, mask: (kl(policy - ref) * mask).sum() / mask.sum()

    terms = [("k2", lambda d: d.square() / 2), ("k1 (default)", lambda d: d), ("k1 again", lambda d: 2 * d)]
    losses = [AuditedLoss(name=name, compute=token_mean(kl)) for name, kl in terms]
    losses.append(AuditedLoss(name="it", compute=lambda *_: 1 / 0))  # type: ignore[arg-type, return-value]
    subject = Subject(title="mine 1.0", losses=tuple(losses), notes=("beta is 0.",))
    show_audit(subject, audit(subject))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine 1.0"
    cells = [tuple(re.split(r"\s{2,}", line.strip())) for line in lines[1:6]]
    assert cells[0] == HEADINGS
    assert cells[1:] == [
        ("k2", "reverse", "reverse", "0", "17 %", "token", "sound", "no-ratio"),
        ("k1 (default)", "reverse", "zero", "100 %", "105 %", "token", "WRONG", "kl-zero"),
        ("k1 again", "reverse", "zero", "100 %", "113 %", "token", "WRONG", "kl-zero"),
        ("it", "reverse", "-", "-", "-", "-", "cannot tell", "check-failed"),
    ]
    told = [line.partition(":")[0] for line in lines[6:] if line]
    assert told == ["- no-ratio (k2)", "- kl-zero (k1 (default))", "- check-failed (it)", "- beta is 0."]


LOSS = """
def total(student, teacher, tokens, mask):
    return distil(student, teacher, tokens, mask) * mask.sum()
def distil(student, teacher, tokens, mask):
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)[..., : student.shape[-1]]
    return ((q.exp() * (q - p)).sum(-1) * mask).sum() / mask.sum()
"""


def test_what_a_loss_can_be_meant_to_be_are_the_cores_directions() -> None:
    assert get_args(get_type_hints(AuditOptions)["means"]) == get_args(Direction)


@pytest.mark.parametrize(
    ("name", "means", "code"), [("distil", "reverse", 1), ("distil", "forward", 0), ("total", "forward", 0)]
)
def test_a_loss_of_distillation(name: str, means: str, code: int, tmp_path: Path, capsys) -> None:
    (tmp_path / "klamp_my_distil.py").write_text(LOSS, encoding="utf-8")
    assert main(["audit", f"klamp_my_distil:{name}", "--means", means]) == code
    out = capsys.readouterr().out
    assert "klamp check: " + ("sound" if code == 0 else "WRONG") in out and LEGEND not in out
