"""`klamp audit liger` against the installed Liger kernels, and through the whole chunked loss."""

from __future__ import annotations

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from tests.engines.enumeration import VOCAB, assert_follows, expected_loss, make_world
from torch import Tensor

from klamp.audit import load_subject
from klamp.audit.examine import Audit, audit
from klamp.audit.liger import kl_loss
from klamp.cli.audit import row

PLAIN = "use_bias_correction_kl=False (default)"
CORRECTED = "use_bias_correction_kl=True"
SEQUENCE = "sequence-level ratio, bias correction"


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(load_subject("liger"))


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        (PLAIN, ("unbiased", "forward", "neither", "-", "±30", "±30", "-11 +30 inf")),
        (CORRECTED, ("unbiased", "reverse", "reverse", "-", "-17 +30 off", "-5 +30 off", "-8 +30 off")),
        (SEQUENCE, ("unbiased", "neither", "neither", "-", "-17 +30 off", "-5 +30 off", "-8 +30 off")),
    ],
)
def test_every_cell(audited: Audit, name: str, cells: tuple[str, ...]) -> None:
    assert [row(finding)[1:] for finding in audited.findings if finding.term.name == name] == [cells]
    assert len(audited.findings) == 3


def test_normalisers(audited: Audit) -> None:
    """luspo's mean runs over the padded batch, and takes in what stands in the padding."""
    batch, rows = "mean over the tokens of the batch", "mean over each completion, mean over completions"
    luspo = "sum over tokens, each times its completion's length / (completions x padded length), padding included"
    assert audited.reductions == {
        "loss_type=dapo (default)": batch,
        "loss_type=grpo": rows,
        "loss_type=bnpo": batch,
        "loss_type=dr_grpo": "sum over tokens / (completions x 256)",
        "loss_type=cispo": batch,
        "loss_type=sapo": rows,
        "loss_type=vespo": batch,
        "loss_type=luspo": luspo,
    }


@pytest.mark.parametrize(("corrected", "follows"), [(False, "forward"), (True, "reverse")])
def test_an_enumeration_of_its_own(corrected: bool, follows: str) -> None:
    policy, ref = make_world()

    def loss(p: Tensor, q: Tensor, token: int) -> Tensor:
        one = p[token].view(1, 1)
        mask = torch.ones(1, 1, dtype=torch.bool)
        return kl_loss(one, q[token].view(1, 1), one.detach(), mask, use_bias_correction_kl=corrected)

    value, gradient = expected_loss(loss, policy, ref)
    exact = (policy.softmax(-1) * (policy.log_softmax(-1) - ref.log_softmax(-1))).sum().item()
    assert value == pytest.approx(exact, abs=1e-12)
    assert_follows(gradient, follows, policy, ref)


@pytest.mark.parametrize(("corrected", "follows"), [(False, "forward"), (True, "reverse")])
def test_the_whole_chunked_loss(corrected: bool, follows: str) -> None:
    """From hidden states: the policy's logits are the hidden state itself, under an identity head."""
    policy, ref = make_world()
    probs, q = policy.detach().softmax(-1), ref.log_softmax(-1)
    hidden = policy.detach().float().view(1, 1, VOCAB).requires_grad_()
    totals = []
    for beta in (1.0, 0.0):
        module = LigerFusedLinearGRPOLoss(beta=beta, compiled=False, loss_type="grpo", use_bias_correction_kl=corrected)
        losses = [
            module(
                hidden,
                torch.eye(VOCAB),
                torch.tensor([[token]]),
                torch.ones(1, 1),
                torch.zeros(1),
                ref_per_token_logps=q[token].view(1, 1).float(),
            )[0]
            * probs[token].float()
            for token in range(VOCAB)
        ]
        totals.append(torch.stack(losses).sum())
    (gradient,) = torch.autograd.grad(totals[0] - totals[1], hidden)
    assert_follows(gradient.view(-1).double(), follows, policy, ref, tolerance=1e-5)


def test_log_probabilities_are_float32_whatever_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a note of the audit claims."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction as Function

    seen = []
    original = Function.ppo_loss_fn

    def spy(**given):
        seen.append((given["per_token_logps"].dtype, given["ref_per_token_logps"].dtype))
        return original(**given)

    monkeypatch.setattr(Function, "ppo_loss_fn", staticmethod(spy))
    half = torch.bfloat16
    LigerFusedLinearGRPOLoss(beta=1.0, compiled=False)(
        torch.randn(1, 2, VOCAB, dtype=half, requires_grad=True),
        torch.eye(VOCAB, dtype=half),
        torch.tensor([[0, 1]]),
        torch.ones(1, 2),
        torch.zeros(1),
        ref_per_token_logps=torch.full((1, 2), -1.0, dtype=half),
    )
    assert seen == [(torch.float32, torch.float32)]
