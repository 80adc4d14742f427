"""verl's own actor loss under `klamp.check`: `register(check=True)`."""

import pytest
import torch
from tests.engines.verl.actor import Step, actor_loss

from klamp.hosts.verl import hooks
from klamp.verl import register

BETA = 0.1
pytestmark = [pytest.mark.gate, pytest.mark.filterwarnings("ignore::klamp.errors.KLWarning")]


@pytest.fixture
def verdicts(untouched: None, monkeypatch: pytest.MonkeyPatch) -> list:
    """What is found out in this test, at each micro-batch."""
    monkeypatch.setattr(hooks, "VERDICTS", [])
    monkeypatch.setattr(hooks, "AT", range(10))
    register(check=True)
    return hooks.VERDICTS


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "ok", "kl"),
    [("k2", True, "reverse"), ("low_var_kl", False, "forward"), ("k1", False, "zero"), ("klamp", True, "reverse")],
)
def test_a_kl_in_the_loss(kind: str, ok: bool, kl: str, nested: bool, verdicts: list) -> None:
    step = Step.random(12, 9)
    loss, _ = actor_loss(step, use_kl_loss=True, kl_loss_type=kind, kl_loss_coef=BETA, nested=nested)
    (verdict,) = verdicts
    assert (verdict.ok, verdict.kl) == (ok, kl), str(verdict)
    assert verdict.beta == pytest.approx(BETA, rel=1e-3)
    (slope,) = torch.autograd.grad(loss, step.policy)
    assert slope.isfinite().all()


def test_without_a_kl_and_with_a_check_that_fails(verdicts: list, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.random(12, 9)
    bare, _ = actor_loss(step)
    assert [x.ok for x in verdicts] == [True] and "the KL" in verdicts[0].not_checked, str(verdicts[0])
    monkeypatch.setattr(hooks, "check_loss", lambda *_, **__: 1 / 0)
    again, _ = actor_loss(step)
    assert again == bare and len(verdicts) == 1
