"""`klamp audit trl` against the installed TRL: every cell, and the same by another way through TRL's own forward."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tests.engines.documented import assert_documented
from tests.engines.enumeration import assert_follows, expected_loss, make_world
from torch import Tensor

from klamp.audit import load_subject
from klamp.audit.examine import Audit, audit
from klamp.audit.trl import build_trainer, kl_loss
from klamp.cli.audit import row, run

pytestmark = pytest.mark.slow

DEFAULT = "use_bias_correction_kl=True (default)"
PLAIN = "use_bias_correction_kl=False"
SEQUENCE = "sequence-level ratio, bias correction"


@pytest.fixture(scope="module")
def trainer() -> Any:
    return build_trainer()


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(load_subject("trl"))


def test_the_version_is_one_that_was_tried(audited: Audit) -> None:
    assert audited.subject.title == "trl 1.16.0, GRPOTrainer"
    assert audited.subject.cautions == ()


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        (DEFAULT, ("unbiased", "reverse", "reverse", "-", "-17 +30 off", "-5 +30 off", "-8 +30 off")),
        (PLAIN, ("unbiased", "forward", "neither", "-", "±30", "±30", "-11 +30 inf")),
        (SEQUENCE, ("unbiased", "neither", "neither", "-", "-17 +30 off", "-5 +30 off", "-8 +30 off")),
    ],
)
def test_every_cell(audited: Audit, name: str, cells: tuple[str, ...]) -> None:
    assert [row(finding)[1:] for finding in audited.findings if finding.term.name == name] == [cells]


def test_the_default_stands_first_and_nothing_else_is_there(audited: Audit) -> None:
    assert [finding.term.name for finding in audited.findings] == [DEFAULT, PLAIN, SEQUENCE]


def test_normalisers(audited: Audit) -> None:
    """As the field notes have them, for one process without accumulation."""
    batch, rows = "mean over the tokens of the batch", "mean over each completion, mean over completions"
    assert audited.reductions == {
        "loss_type=dapo (default)": batch,
        "loss_type=grpo": rows,
        "loss_type=bnpo": batch,
        "loss_type=dr_grpo": "sum over tokens / (completions x 512)",
        "loss_type=cispo": batch,
        "loss_type=sapo": rows,
        "loss_type=vespo": batch,
        "loss_type=luspo": "sum over each completion, mean over completions",
    }


@pytest.mark.parametrize(
    ("corrected", "on_policy", "off_policy"), [(True, "reverse", "reverse"), (False, "forward", None)]
)
def test_an_enumeration_of_its_own(trainer: Any, corrected: bool, on_policy: str, off_policy: str | None) -> None:
    policy, ref = make_world()
    sampler, _ = make_world(seed=9)

    def loss(p: Tensor, q: Tensor, token: int, old: Tensor | None = None) -> Tensor:
        one = p[token].view(1, 1)
        before = one.detach() if old is None else old.detach().log_softmax(-1)[token].view(1, 1)
        mask = torch.ones(1, 1, dtype=torch.bool)
        return kl_loss(trainer, one, q[token].view(1, 1), before, mask, use_bias_correction_kl=corrected)

    value, gradient = expected_loss(loss, policy, ref)
    exact = (policy.softmax(-1) * (policy.log_softmax(-1) - ref.log_softmax(-1))).sum().item()
    assert value == pytest.approx(exact, abs=1e-12)
    assert_follows(gradient, on_policy, policy, ref)
    _, gradient = expected_loss(lambda p, q, token: loss(p, q, token, sampler), policy, ref, sampler)
    assert_follows(gradient, off_policy or "none of them", policy, ref)


@pytest.mark.parametrize(("corrected", "sign_of"), [(True, "reverse"), (False, "forward")])
def test_the_whole_forward_of_a_model(trainer: Any, corrected: bool, sign_of: str) -> None:
    """Nothing replaced: TRL scores each token with its model; weighted by the model's own probabilities, the gradient
    with respect to its weights is that of the exact divergence of its logits."""
    model, parameters = trainer.model, list(trainer.model.parameters())
    vocab = model.config.vocab_size
    prompt = torch.tensor([[3]])
    ref = torch.randn(vocab, dtype=torch.float32).log_softmax(-1)
    trainer.args.use_bias_correction_kl = corrected
    logp = model(input_ids=prompt).logits[0, -1].float().log_softmax(-1)
    total = torch.zeros(())
    for token in range(vocab):
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": torch.tensor([[token]]),
            "completion_mask": torch.ones(1, 1, dtype=torch.long),
            "advantages": torch.zeros(1),
            "ref_per_token_logps": ref[token].view(1, 1),
            "num_items_in_batch": torch.tensor(1),
        }
        losses = []
        for trainer.beta in (1.0, 0.0):
            losses.append(trainer._compute_loss(model, inputs))
        total = total + logp[token].exp().detach() * (losses[0] - losses[1])
    exact = {"reverse": (logp.exp() * (logp - ref)).sum(), "forward": (ref.exp() * (ref - logp)).sum()}
    got = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
    want = torch.autograd.grad(exact[sign_of], parameters, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert any(b is not None and b.abs().max() > 1e-3 for b in want)


def test_the_kl_is_linear_in_beta(trainer: Any) -> None:
    """What allows the audit to take the KL as the loss at beta 1 less the loss at beta 0."""
    inputs = {
        "prompt_ids": torch.tensor([[3], [3]]),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.tensor([[1, 2], [3, 0]]),
        "completion_mask": torch.tensor([[1, 1], [1, 0]]),
        "advantages": torch.tensor([0.7, -1.3]),
        "ref_per_token_logps": torch.full((2, 2), -1.0),
        "num_items_in_batch": torch.tensor(3),
    }
    losses = []
    for trainer.beta in (0.0, 0.5, 2.0):
        losses.append(trainer._compute_loss(trainer.model, inputs).item())
    assert losses[1] - losses[0] != 0
    assert (losses[2] - losses[0]) / (losses[1] - losses[0]) == pytest.approx(4.0, rel=1e-4)


def test_log_probabilities_are_float32_whatever_the_model(trainer: Any) -> None:
    """What a note of the audit claims."""
    ids = torch.tensor([[3, 1, 2]])
    model = trainer.model.to(torch.bfloat16)
    try:
        scored = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 2)
    finally:
        trainer.model.to(torch.float32)
    assert scored[0].dtype == torch.float32


def test_in_float32_the_default_has_no_gradient_at_minus_30_nats(audited: Audit) -> None:
    """Two terms of exp(30) cancel: where a token is far below the reference nothing pulls it back up."""
    judgement = audited.findings[0].judgement
    assert judgement is not None
    assert judgement.probe(torch.float32, -30.0).gradient == 0
    assert judgement.probe(torch.float32, 30.0).gradient == pytest.approx(30.0)


def test_the_command(audited: Audit, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    assert run(["trl"], stream=out) == 0
    text = out.getvalue()
    assert text.startswith("trl 1.16.0, GRPOTrainer\n  KL term")
    assert f"{SEQUENCE}: one token alone follows reverse; completions of several tokens follow neither." in text
    assert "beta is 0 by default" in text
    assert "\x1b" not in text
    assert capsys.readouterr().err == ""


def test_the_page_shows_what_the_command_prints() -> None:
    assert_documented("trl", "liger", "torchrl")
