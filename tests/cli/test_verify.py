"""`klamp verify`: every check shown, exit code 1 when one fails, the questions."""

from __future__ import annotations

import contextlib
import dataclasses
import io

import pytest
import torch

from klamp.cli import main
from klamp.cli.verify import run
from klamp.core.estimators import ESTIMATORS
from klamp.errors import UnknownNameError
from klamp.verify.proofs import PROOFS

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


def shown(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return run(argv), out.getvalue()


def break_k3(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(ESTIMATORS["k3"], value=lambda delta: -(torch.expm1(-delta) + delta))
    monkeypatch.setitem(ESTIMATORS, "k3", row)


def test_everything_passes_and_is_shown() -> None:
    code, text = shown()
    assert code == 0
    assert all(section in text for section in PROOFS)
    assert "FAIL" not in text
    assert "checks passed, in" in text.splitlines()[-1]
    assert text.count("\n  ok  ") > 100


def test_a_broken_sign_fails_with_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    break_k3(monkeypatch)
    code, text = shown()
    assert code == 1
    assert "\n  FAIL  E[k3] - KL(policy||ref) " in text
    assert "checks FAILED:" in text
    assert "values: tokens of the policy: E[k3] - KL(policy||ref): expected 0, got " in text


def test_a_question_is_answered_in_numbers_and_words() -> None:
    code, text = shown("direction")
    assert code == 0
    assert "As a loss it is not what its value says" in " ".join(text.split())
    assert " +- " in text
    again = shown("direction")[1]
    assert text.rsplit(",", 1)[0] == again.rsplit(",", 1)[0]


def test_an_answer_that_does_not_hold_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    break_k3(monkeypatch)
    code, text = shown("direction")
    assert code == 1
    assert "As a value it is right" not in text


@pytest.mark.parametrize(
    ("argv", "error", "said"),
    [
        (["directoin"], UnknownNameError, "did you mean 'direction'"),
        (["direction", "--samples", "3"], UnknownNameError, "--samples"),
    ],
)
def test_wrong_arguments(argv: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run(argv)
    assert main(["verify", *argv]) == 2
