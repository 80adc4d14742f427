"""`klamp audit verl` against the installed verl, and through the whole of its actor loss."""

from __future__ import annotations

import pytest
import torch
from tests.engines.documented import assert_documented
from tests.engines.enumeration import assert_follows, expected_loss, make_world
from tests.engines.verl.actor import Step, actor_loss
from torch import Tensor

from klamp.audit import load_subject
from klamp.audit.examine import Audit, audit

DEFAULT = "kl_loss_type=low_var_kl (k3) (default)"


@pytest.fixture(scope="module")
def audited() -> Audit:
    return audit(load_subject("verl"))


def kl_part(policy: Tensor, ref: Tensor, **options: object) -> Tensor:
    """The KL in verl's whole actor loss, at coefficient 1."""
    nothing, mask = torch.zeros_like(policy), torch.ones(policy.shape, dtype=torch.bool)
    step = Step(policy=policy, old=policy.detach(), ref=ref, mask=mask, advantages=nothing)
    with_kl, without = (actor_loss(step, use_kl_loss=use, kl_loss_coef=1.0, **options)[0] for use in (True, False))
    return with_kl - without


def test_the_version_is_one_that_was_tried(audited: Audit) -> None:
    assert audited.subject.title.startswith("verl 0.9.1,")
    assert audited.subject.cautions == ()


@pytest.mark.parametrize(
    ("kind", "follows"),
    [
        ("kl", "zero"),
        ("k1", "zero"),
        ("mse", "reverse"),
        ("k2", "reverse"),
        ("mse+", "reverse"),
        ("low_var_kl", "forward"),
        ("k3", "forward"),
        ("low_var_kl+", "reverse"),
        ("k3+", "reverse"),
        ("kl+", "reverse"),
        ("abs+", "reverse"),
        ("abs", "none of them"),
    ],
)
def test_an_enumeration_of_its_own(kind: str, follows: str) -> None:
    """Each name through `ppo_loss`, in a world where no token is past the clamp."""
    policy, ref = make_world()
    assert (policy.log_softmax(-1) - ref.log_softmax(-1)).abs().max() < 2.6

    def loss(p: Tensor, q: Tensor, token: int) -> Tensor:
        return kl_part(p[token].view(1, 1), q[token].view(1, 1), kl_loss_type=kind)

    _, gradient = expected_loss(loss, policy, ref)
    assert_follows(gradient, follows, policy, ref)


def test_the_page_shows_what_the_command_prints() -> None:
    assert_documented("verl")
