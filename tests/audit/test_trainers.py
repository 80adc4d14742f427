"""`klamp audit trl`, `liger`, `torchrl` on what is installed: every cell, and the same by an enumeration of its own."""

from collections.abc import Callable

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from tests.engines.documented import assert_documented
from tests.engines.enumeration import VOCAB, assert_follows, expected_loss, make_world
from tests.hosts.trl.hosts import model, stock_trainer
from torch import Tensor
from torchrl.objectives.llm import k3_kl_token_estimate

from klamp.audit import load_subject, trainers
from klamp.audit.examine import Subject


@pytest.mark.slow
@pytest.mark.parametrize("names", [("liger", "torchrl"), ("trl",)])
def test_the_record_has_what_the_command_prints(names: tuple[str, ...]) -> None:
    assert_documented(*names)
    assert [load_subject(name).cautions for name in names] == [()] * len(names)


def enumerated(loss: Callable[..., Tensor], follows: str, *, off_policy: str = "none of them") -> None:
    """A `HostLoss` has the value of KL(policy||ref) and follows this gradient; with tokens of another policy, that."""
    policy, ref = make_world()
    sampler, _ = make_world(seed=9)

    def on(p: Tensor, q: Tensor, token: int, old: Tensor | None = None) -> Tensor:
        drawn_by = p.detach() if old is None else old
        return loss(*(x[token].view(1, 1) for x in (p, q, drawn_by)), torch.ones(1, 1, dtype=torch.bool))

    def off(p: Tensor, q: Tensor, token: int) -> Tensor:
        return on(p, q, token, sampler.detach().log_softmax(-1))

    value, gradient = expected_loss(on, policy, ref)
    exact = (policy.softmax(-1) * (policy.log_softmax(-1) - ref.log_softmax(-1))).sum().item()
    assert value == pytest.approx(exact, abs=1e-12)
    assert_follows(gradient, follows, policy, ref)
    _, gradient = expected_loss(off, policy, ref, sampler)
    assert_follows(gradient, off_policy, policy, ref)


def grpo_loss(subject: Subject, corrected: bool) -> Callable[..., Tensor]:
    compute = next(x for x in subject.losses if f"use_bias_correction_kl={corrected}" in x.name).compute
    return lambda *scores: compute(*scores, torch.zeros(len(scores[0])))


@pytest.mark.parametrize("host", ["liger", pytest.param("trl", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("corrected", "follows", "off_policy"), [(True, "reverse", "reverse"), (False, "forward", "none of them")]
)
def test_an_enumeration_of_its_own(host: str, corrected: bool, follows: str, off_policy: str) -> None:
    subject = getattr(trainers, host)()
    enumerated(grpo_loss(subject, corrected), follows, off_policy=off_policy)


def torchrl_kl(*scores: Tensor) -> Tensor:
    return trainers.torchrl_kl(*scores, torch.zeros(len(scores[0])))


def test_an_enumeration_of_its_own_of_torchrl() -> None:
    enumerated(torchrl_kl, "forward")
    policy, ref = make_world()

    def estimate(p: Tensor, q: Tensor, token: int) -> Tensor:
        return k3_kl_token_estimate(q[token], p[token])

    _, gradient = expected_loss(estimate, policy, ref)
    assert_follows(gradient, "forward", policy, ref)


def test_torchrl_averages_its_kl_over_the_padding() -> None:
    """Whatever the aggregation of the objective: padding dilutes it."""
    policy, ref = torch.full((1, 2), -1.0), torch.full((1, 2), -1.5)
    one = torchrl_kl(policy, ref, policy, torch.tensor([[True, True]]))
    padded = torchrl_kl(policy, ref, policy, torch.tensor([[True, False]]))
    assert padded == pytest.approx(one.item() / 2)


@pytest.mark.parametrize(("corrected", "follows"), [(False, "forward"), (True, "reverse")])
def test_the_whole_chunked_loss_of_liger(corrected: bool, follows: str) -> None:
    """From hidden states: the policy's logits are the hidden state itself, under an identity head."""
    policy, ref = make_world()
    probs, q = policy.detach().softmax(-1), ref.log_softmax(-1)
    hidden = policy.detach().float().view(1, 1, VOCAB).requires_grad_()
    totals = []
    for beta in (1.0, 0.0):
        module = LigerFusedLinearGRPOLoss(beta=beta, compiled=False, loss_type="grpo", use_bias_correction_kl=corrected)
        total = torch.zeros(())
        for token in range(VOCAB):
            one = (torch.tensor([[token]]), torch.ones(1, 1), torch.zeros(1))
            loss = module(hidden, torch.eye(VOCAB), *one, ref_per_token_logps=q[token].view(1, 1).float())[0]
            total = total + loss * probs[token].float()
        totals.append(total)
    (gradient,) = torch.autograd.grad(totals[0] - totals[1], hidden)
    assert_follows(gradient.view(-1).double(), follows, policy, ref, tolerance=1e-5)


@pytest.mark.slow
def test_the_kl_of_trl_is_linear_in_beta() -> None:
    """What allows the audit to take the KL as the loss at beta 1 less the loss at beta 0."""
    trainer = stock_trainer(model(), beta=0.0)
    trainer.current_gradient_accumulation_steps = 1
    mask = torch.tensor([[1, 1], [1, 0]])
    inputs = {
        "prompt_ids": torch.full((2, 1), 3),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.tensor([[1, 2], [3, 0]]),
        "completion_mask": mask,
        "advantages": torch.tensor([0.7, -1.3]),
        "ref_per_token_logps": torch.full((2, 2), -1.0),
        "num_items_in_batch": mask.sum(),
    }
    losses = []
    for trainer.beta in (0.0, 0.5, 2.0):
        losses.append(trainer._compute_loss(trainer.model, inputs).item())
    assert losses[1] - losses[0] != 0
    assert (losses[2] - losses[0]) / (losses[1] - losses[0]) == pytest.approx(4.0, rel=1e-4)
