"""`klamp audit torchrl` against the installed torchrl."""

from __future__ import annotations

import pytest
import torch
from tests.engines.enumeration import assert_follows, expected_loss, make_world
from torch import Tensor
from torchrl.objectives.llm import k3_kl_token_estimate

from klamp.audit import load_subject
from klamp.audit.examine import Audit, audit
from klamp.audit.torchrl import kl_loss, reward_kl
from klamp.cli.audit import row

K3 = ("unbiased", "forward", "neither", "-", "±30", "±30", "-11 +30 inf")


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(load_subject("torchrl"))


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("GRPOLoss, kl_to_ref_coeff", K3),
        ("k3_kl_token_estimate(ref, policy)", K3),
        ("KLComputation, in the reward", ("unbiased", "reverse", "neither", "-", "±30", "±30", "±30")),
    ],
)
def test_every_cell(audited: Audit, name: str, cells: tuple[str, ...]) -> None:
    assert [row(finding)[1:] for finding in audited.findings if finding.term.name == name] == [cells]
    assert len(audited.findings) == 3


def test_the_kl_is_averaged_over_the_padding(audited: Audit) -> None:
    """Whatever the aggregation of the objective, the KL is a mean over the padded batch: padding dilutes it."""
    assert set(audited.reductions.values()) == {"sum over tokens / (completions x padded length)"}
    policy, ref = torch.full((1, 2), -1.0), torch.full((1, 2), -1.5)
    one = kl_loss(policy, ref, policy, torch.tensor([[True, True]]))
    padded = kl_loss(policy, ref, policy, torch.tensor([[True, False]]))
    assert padded == pytest.approx(one.item() / 2)


def test_an_enumeration_of_its_own() -> None:
    policy, ref = make_world()

    def loss(p: Tensor, q: Tensor, token: int) -> Tensor:
        one = p[token].view(1, 1)
        return kl_loss(one, q[token].view(1, 1), one.detach(), torch.ones(1, 1, dtype=torch.bool))

    def estimate(p: Tensor, q: Tensor, token: int) -> Tensor:
        return k3_kl_token_estimate(q[token], p[token])

    def reward(p: Tensor, q: Tensor, token: int) -> Tensor:
        return reward_kl(p[token].view(1, 1), q[token].view(1, 1)).squeeze() * p[token]

    for each, follows in ((loss, "forward"), (estimate, "forward"), (reward, "reverse")):
        _, gradient = expected_loss(each, policy, ref)
        assert_follows(gradient, follows, policy, ref)
