"""`klamp audit verl` against the installed verl, and through the whole of its actor loss."""

import pytest
import torch
from tests.engines.documented import assert_documented
from tests.engines.enumeration import assert_follows, expected_loss, make_world
from tests.engines.verl.actor import Step, actor_loss
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.ray_trainer import apply_kl_penalty

from klamp.audit import load_subject


def kl_part(policy: Tensor, ref: Tensor, **options: object) -> Tensor:
    """The KL in verl's whole actor loss, at coefficient 1."""
    nothing, mask = torch.zeros_like(policy), torch.ones(policy.shape, dtype=torch.bool)
    step = Step(policy=policy, old=policy.detach(), ref=ref, mask=mask, advantages=nothing)
    with_kl, without = (actor_loss(step, use_kl_loss=use, kl_loss_coef=1.0, **options)[0] for use in (True, False))
    return with_kl - without


def test_k3_has_no_gradient_past_its_clamp() -> None:
    """Its value stops at 10: exp(x) - x - 1 = 10 at x = 2.6109 below the reference, and at 11 - exp(-11) above."""
    for log_ratio, dead in ((-2.60, False), (-2.62, True), (10.9, False), (11.1, True)):
        policy = torch.tensor([[-20.0]], dtype=torch.float64, requires_grad=True)
        loss = kl_part(policy, policy.detach() - log_ratio)
        (slope,) = torch.autograd.grad(loss, policy)
        assert (slope.item() == 0) == dead


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


def reward_kl(policy: Tensor, ref: Tensor, kind: str) -> Tensor:
    """What verl takes from each token's reward at coefficient 1."""
    nothing, mask = torch.zeros_like(policy), torch.ones_like(policy, dtype=torch.long)
    tensors = {"response_mask": mask, "token_level_scores": nothing, "old_log_probs": policy.detach()}
    batch = DataProto.from_dict(tensors=tensors | {"ref_log_prob": ref})
    return -apply_kl_penalty(batch, FixedKLController(1.0), kl_penalty=kind)[0].batch["token_level_rewards"]


@pytest.mark.parametrize(("kind", "follows"), [("kl", "reverse"), ("mse", "none of them"), ("abs", "none of them")])
def test_in_the_reward_only_k1_is_right(kind: str, follows: str) -> None:
    policy, ref = make_world()

    def loss(p: Tensor, q: Tensor, token: int) -> Tensor:
        return reward_kl(p[token].view(1, 1), q[token].view(1, 1), kind).squeeze() * p[token]

    _, gradient = expected_loss(loss, policy, ref)
    assert_follows(gradient, follows, policy, ref)


def test_the_page_shows_what_the_command_prints() -> None:
    assert_documented("verl")
    assert load_subject("verl").cautions == ()
