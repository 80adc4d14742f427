"""Checks of the KL in the reward and in the advantage: its gradient, and beta's effect in saturated groups."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.price import configured_price
from klamp.core.advantages import Baseline, group_advantages
from klamp.core.placement import kl_in_advantage, kl_in_reward
from klamp.errors import ConfigError
from klamp.verify.one_step import Rewards, StepReport, examine_config, scene
from klamp.verify.oracle import gradient_of
from klamp.verify.proofs.check import Check, follows, is_equal, is_true

KINDS: dict[Rewards, str] = {"equal": "saturated groups", "mixed": "mixed groups"}


def prove_placement() -> list[Check]:
    """Checks every place of the KL through a whole step, with groups of two, saturated and mixed."""
    return [*_gradients(), *_saturated(), *_lengths(), *_prices()]


def _gradients() -> list[Check]:
    reward = KLConfig(kl_estimator="k1", kl_placement="reward", kl_horizon="sequence")
    to_go = KLConfig(kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")
    token = KLConfig(kl_estimator="k1", kl_placement="advantage", kl_horizon="token")
    mean_baseline = LossConfig(advantage_baseline="mean")
    rows = [
        ("in the reward, against the mean of the others", reward, None, "reverse", 1.0),
        ("in the advantage, reward-to-go", to_go, None, "reverse", 1.0),
        ("in the advantage, token by token", token, None, "local", 1.0),
        # dr_grpo divides by the longest length (2), the group's mean holds a completion's own KL: (2 - 1)/2.
        ("in the reward, against the group's mean of 2, dr_grpo", reward, mean_baseline, "reverse", 0.25),
    ]
    checks: list[Check] = []
    for claim, kl, loss, name, factor in rows:
        for rewards, kind in KINDS.items():
            world = scene(0, length=2, rewards=rewards)
            found = examine_config(kl, loss, scene=world)
            known = [world.truths]
            checks.append(follows(f"{claim}; {kind}", [found.kl.gradient], known, name, factor=factor))
    return checks


def _saturated() -> list[Check]:
    """Checks groups of equal rewards: division by the group's std makes beta drop out of a KL in the reward."""
    spent = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    rewards = torch.ones(4, dtype=torch.float64)
    small, large = (
        group_advantages(kl_in_reward(rewards, spent, beta=beta), 4, scale="std", eps=0.0) for beta in (0.01, 1.0)
    )
    refused = ""
    try:
        build_objective(
            KLConfig(kl_estimator="k1", kl_placement="reward", kl_horizon="sequence"),
            LossConfig(scale_rewards="std"),
            max_length=1,
        )
    except ConfigError as error:
        refused = error.what
    noise = torch.full((4,), 0.1, dtype=torch.float64)
    return [
        is_equal(
            "in the reward, divided by the std: 100 times beta gives the same advantages",
            (large - small).abs().max(),
            0.0,
        ),
        is_true("so klamp refuses it", refused != "", refused or "accepted", expected="refused"),
        is_equal("in the advantage, after the division: 100 times beta is 100 times the pull", _guarded_ratio(), 100.0),
        is_equal("a group whose rewards are all equal", group_advantages(noise, 4, scale="std").abs().max(), 0.0),
    ]


def _guarded_ratio() -> float:
    world = scene(0, length=2)
    sizes: list[Tensor] = []
    for beta in (0.01, 1.0):
        kl = KLConfig(beta=beta, kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")
        found: StepReport = examine_config(kl, LossConfig(scale_rewards="std"), scene=world)
        sizes.append(beta * found.kl.gradient.norm())
    return (sizes[1] / sizes[0]).item()


def _lengths() -> list[Check]:
    """Checks what length does to the same KL, spread over a short and over a long completion of equal reward."""
    mask = torch.tensor([[True] * 2 + [False] * 8, [True] * 10])
    delta = torch.where(mask, 1.0 / mask.sum(-1, keepdim=True).double(), 0.0)
    means = delta.sum(-1) / mask.sum(-1)
    by_mean = group_advantages(kl_in_reward(torch.ones(2).double(), means, beta=0.1), 2, scale="std")
    by_sum = group_advantages(kl_in_reward(torch.ones(2).double(), delta.sum(-1), beta=0.1), 2, scale="none")
    shifted = kl_in_advantage(torch.zeros(2).double(), delta, torch.zeros_like(delta), mask, beta=0.1)
    return [
        is_true(
            "a mean over the own length in the reward: the longest completion wins",
            by_mean[1] > 0 > by_mean[0],
            f"advantages {by_mean[0].item():+.3f} (2 tokens), {by_mean[1].item():+.3f} (10 tokens)",
        ),
        is_equal("a sum over the completion: equal nats, equal advantages", (by_sum[1] - by_sum[0]).abs(), 0.0),
        is_equal("in the advantage: equal nats, equal shift of the first token", shifted[0, 0] - shifted[1, 0], 0.0),
    ]


def _prices() -> list[Check]:
    """Checks what a nat of a whole completion costs in reward, from the two halves of the expected update.

    The half without a KL is -a grad E[reward], the half of the KL is b grad KL(policy||ref): the price is b / a.
    """
    k3 = KLConfig(beta=0.1, kl_horizon="sequence")
    k1 = replace(k3, kl_estimator="k1")
    terms = {
        "loss, k3": k3,
        "loss, k1": k1,
        "advantage, k1": replace(k1, kl_placement="advantage"),
        "reward, k1": replace(k1, kl_placement="reward"),
        "loss, k3, a sum beside a fixed length": replace(k3, kl_normalizer="sequence_sum"),
        "loss, k3, a token mean beside a fixed length": replace(k3, kl_normalizer="token_mean"),
    }
    world = scene(0, length=2, rewards="mixed", group_size=3, denominators="expected")
    outcomes, rewards = world.outcomes, world.rewards
    assert rewards is not None
    reward = gradient_of((outcomes.policy_logprobs.sum(-1).exp() * rewards).sum(), world.chain)
    reverse = world.truths["reverse"]
    length = float((outcomes.probs * world.lengths).sum())
    checks: list[Check] = []
    for name, kl in terms.items():
        for baseline in get_args(Baseline):
            loss = LossConfig(loss_type="dr_grpo", advantage_baseline=baseline)
            price = configured_price(kl, loss, group_size=3, mean_length=length, max_length=2).per_completion
            step = examine_config(kl, loss, scene=world)
            earned, paid = _multiple(-step.policy_gradient, reward), _multiple(kl.beta * step.kl.gradient, reverse)
            claim = f"{name}; {baseline} of 3: {price:.4g} reward per nat of a completion at beta {kl.beta:g}"
            checks.append(is_equal(claim, paid / earned, price))
    return checks


def _multiple(gradient: Tensor, of: Tensor) -> Tensor:
    return (gradient * of).sum() / of.square().sum()
