"""`klamp audit`: functions of a module in the working directory, hosts that are not there, rows of the table."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from klamp.audit.examine import Audit, Reach, Subject, Term, TermFinding
from klamp.cli import main
from klamp.cli.audit import DISTILLATION_LEGEND, HEADINGS, LEGEND, exit_codes, row
from klamp.cli.commands import AuditOptions
from klamp.core.types import Direction
from klamp.verify.judge import judge
from klamp.verify.oracle import Followed

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

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
ALL = ["±30", "±30", "±30"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "klamp_my_kl.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "klamp_my_kl", raising=False)


def audit_cells(capsys: pytest.CaptureFixture[str], function: str) -> list[list[str]]:
    """The cells of the two rows: as a loss, in the reward."""
    assert main(["audit", f"klamp_my_kl:{function}"]) == 1  # each of them is wrong as a loss
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"klamp_my_kl:{function}"
    assert tuple(lines[1].split("  ")[1:2]) == HEADINGS[:1]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:4]]


@pytest.mark.parametrize(
    ("function", "as_a_loss", "in_the_reward"),
    [
        ("k1", ["unbiased", "zero", "neither", "-"], ["unbiased", "reverse", "neither", "-"]),
        ("minus_k1", ["-200.0%", "zero", "neither", "-"], ["-200.0%", "-reverse", "neither", "-"]),
        ("clamped_k3", ["-23.3%", "forward near", "neither", "-2, +2"], ["-23.3%", "neither", "neither", "-"]),
        ("detached", ["+38.3%", "zero", "zero", "everywhere"], ["+38.3%", "neither", "neither", "-"]),
    ],
)
def test_functions(
    capsys: pytest.CaptureFixture[str], function: str, as_a_loss: list[str], in_the_reward: list[str]
) -> None:
    assert audit_cells(capsys, function) == [["as a loss", *as_a_loss, *ALL], ["in the reward", *in_the_reward, *ALL]]


def test_a_clamp_is_put_into_words_and_the_legend_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "klamp_my_kl:clamped_k3", "klamp_my_kl:k1"]) == 1
    out = capsys.readouterr().out
    assert (
        "- as a loss: its clamp changes the value by -23.3% at a KL of 0.89 nats per token; "
        "near the reference the value is unbiased.\n" in out
    )
    assert out.count("reverse = KL(policy||ref)") == 1
    assert out.index("klamp_my_kl:clamped_k3") < out.index("klamp_my_kl:k1") < out.index("reverse = KL")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["tlr"], 2, "did you mean 'trl'"),
        (["klamp_my_kl:k9"], 2, "did you mean"),
        (["--use", "trl"], 2, "unknown flag"),
        (["klamp_my_kl:total"], 2, "one number per token"),
    ],
)
def test_what_cannot_be_audited(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *argv]) == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["klamp_my_kl:k2"], 0, "klamp check: sound"),
        (["klamp_my_kl:k1"], 1, "klamp check: WRONG"),
        (["klamp_my_kl:k3"], 1, "KL(ref||policy)"),
        (["klamp_my_kl:k3", "--means", "forward"], 0, "klamp check: sound"),
        (["klamp_my_kl:k2", "klamp_my_kl:k1"], 1, "klamp check: WRONG"),
        (["klamp_my_kl:odd"], 3, "cannot tell"),
    ],
)
def test_the_verdict_on_a_function_is_that_of_check(
    argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *argv]) == code
    assert text in capsys.readouterr().out


def test_the_exit_code_of_a_trainers_rows(sound: TermFinding) -> None:
    def with_gradient(*followed: Followed) -> set[int]:
        rows = [
            dataclasses.replace(
                sound,
                judgement=dataclasses.replace(judge(k3), gradient=dataclasses.replace(judge(k3).gradient, follows=x)),
                on_policy=x,
                near=x,
            )
            for x in followed
        ]
        return exit_codes(Audit(subject=Subject(title="it"), findings=tuple(rows)))

    right, broken = Followed("local", 1.0), TermFinding(term=sound.term, error="ValueError: no")
    assert [with_gradient(right), with_gradient(right, Followed("local", -1.0)), with_gradient()] == [
        {0},
        {0, 1},
        set(),
    ]
    assert exit_codes(Audit(subject=Subject(title="it"), findings=(broken, sound))) == {1, 3}


def k3(policy: Tensor, ref: Tensor) -> Tensor:
    return torch.expm1(ref - policy) - (ref - policy)


@pytest.fixture(scope="module")
def sound() -> TermFinding:
    """k3 as it should be judged."""
    return TermFinding(
        term=Term.of_function("as a loss", k3),
        judgement=judge(k3),
        near=Followed("local_forward", 1.0),
        on_policy=Followed("local_forward", 1.0),
        off_policy=Followed("none of these", 0.0),
        reach=tuple(Reach(dtype=dtype, low=-30, high=30) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    )


def cells(found: TermFinding) -> dict[str, str]:
    return dict(zip(HEADINGS, row(found), strict=True))


LOSS = """
def distil(student, teacher, tokens, mask):
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)[..., : student.shape[-1]]
    return ((q.exp() * (q - p)).sum(-1) * mask).sum() / mask.sum()
"""


def test_what_a_loss_can_be_meant_to_be_are_the_cores_directions() -> None:
    assert get_args(get_type_hints(AuditOptions)["means"]) == get_args(Direction)


@pytest.mark.parametrize(("means", "code"), [("reverse", 1), ("forward", 0)])
def test_a_function_of_four_arguments_is_a_loss_of_distillation(
    means: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "klamp_my_distil.py").write_text(LOSS, encoding="utf-8")
    assert main(["audit", "klamp_my_distil:distil", "--means", means]) == code
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[0] == "distillation" and DISTILLATION_LEGEND in out and LEGEND not in out
    cells = out.splitlines()[2].split()
    assert cells == ["klamp_my_distil:distil", means, "forward", "forward", "forward", "0", "-", "token", "-"]
