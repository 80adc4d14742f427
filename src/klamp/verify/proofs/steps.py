"""Checks of whole steps: the KL in the reward and in the advantage, clips and budgets, and the controllers of beta."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from klamp.config import KLConfig, LossConfig, build_objective
from klamp.config.loss import configured_price
from klamp.core.advantages import Baseline, group_advantages
from klamp.core.clipping import clip_gate, clip_kl, kl_budget
from klamp.core.controllers import ProportionalController, StepController
from klamp.core.estimators import kl_estimate
from klamp.core.penalty import kl_in_advantage
from klamp.errors import ConfigError, NonFiniteError
from klamp.verify.one_step import Rewards, StepReport, examine_config, scene
from klamp.verify.oracle import gradient_of
from klamp.verify.proofs.check import Check, follows, is_equal, is_true

IN_REWARD: dict[str, Any] = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
REWARD = KLConfig(**IN_REWARD)
KINDS: dict[Rewards, str] = {"equal": "saturated groups", "mixed": "mixed groups"}


def prove_placement() -> list[Check]:
    """Checks every place of the KL through a whole step, with groups of two, saturated and mixed."""
    return [*_gradients(), *_saturated(), *_lengths(), *_prices()]


def _gradients() -> list[Check]:
    to_go = KLConfig(kl_estimator="k1", kl_placement="advantage", kl_horizon="sequence")
    token = KLConfig(kl_estimator="k1", kl_placement="advantage", kl_horizon="token")
    mean_baseline = LossConfig(advantage_baseline="mean")
    rows = [
        ("in the reward, against the mean of the others", REWARD, None, "reverse", 1.0),
        ("in the advantage, reward-to-go", to_go, None, "reverse", 1.0),
        ("in the advantage, token by token", token, None, "local", 1.0),
        # dr_grpo divides by the longest length (2), the group's mean holds a completion's own KL: (2 - 1)/2.
        ("in the reward, against the group's mean of 2, dr_grpo", REWARD, mean_baseline, "reverse", 0.25),
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
    small, large = (group_advantages(rewards - beta * spent, 4, scale="std", eps=0.0) for beta in (0.01, 1.0))
    noise = torch.full((4,), 0.1, dtype=torch.float64)
    return [
        is_equal(
            "in the reward, divided by the std: 100 times beta gives the same advantages",
            (large - small).abs().max(),
            0.0,
        ),
        _refuses("that", lambda: build_objective(REWARD, LossConfig(scale_rewards="std"), max_length=1)),
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
    by_mean = group_advantages(1 - 0.1 * means, 2, scale="std")
    by_sum = group_advantages(1 - 0.1 * delta.sum(-1), 2, scale="none")
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
    reward = gradient_of((world.outcomes.policy_logprobs.sum(-1).exp() * world.rewards).sum(), world.chain)
    reverse = world.truths["reverse"]
    checks: list[Check] = []
    for name, kl in terms.items():
        for baseline in get_args(Baseline):
            loss = LossConfig(loss_type="dr_grpo", advantage_baseline=baseline)
            price = configured_price(kl, loss, group_size=3, mean_length=world.mean_length, max_length=2).per_completion
            step = examine_config(kl, loss, scene=world)
            earned, paid = _multiple(-step.policy_gradient, reward), _multiple(kl.beta * step.kl.gradient, reverse)
            claim = f"{name}; {baseline} of 3: {price:.4g} reward per nat of a completion at beta {kl.beta:g}"
            checks.append(is_equal(claim, paid / earned, price))
    return checks


def _multiple(gradient: Tensor, of: Tensor) -> Tensor:
    return (gradient * of).sum() / of.square().sum()


def prove_clipping() -> list[Check]:
    """Checks clips, gates and budgets against the numbers that they should give."""
    budget = kl_budget(0.1, per_token=True, reference_length=50)
    kl = torch.tensor([2.0, 8.0], dtype=torch.float64)
    hard = clip_kl(kl, 5.0, method="hard")
    soft = clip_kl(kl, 5.0, method="soft")
    wide = clip_gate(torch.tensor([0.0, 0.1], dtype=torch.float64), 0.05, method="soft")
    return [
        is_equal("0.1 nats per token x 50 tokens", budget, 5.0),
        is_equal("hard: max(0, 2 - 5) + max(0, 8 - 5)", hard.sum(), 3.0),
        is_equal(
            "soft: softplus(2 - 5) + softplus(8 - 5)", soft.sum(), math.log1p(math.exp(-3)) + math.log1p(math.exp(3))
        ),
        is_equal("hard: slope below and above, by autograd", _slope("hard", 2.0) + 10 * _slope("hard", 8.0), 10.0),
        is_equal("soft: slope sigmoid(8 - 5), by autograd", _slope("soft", 8.0), 1 / (1 + math.exp(-3))),
        is_equal("soft, temperature 1, per-token units: gate at KL 0, threshold .05", wide[0], 0.4875, tolerance=5e-5),
        is_equal("the same at KL .1: half of beta everywhere, no clip", wide[1], 0.5125, tolerance=5e-5),
        is_equal("relu of one noisy KL (.05 +- .5, threshold .1): open", _leak(), 0.46, tolerance=5e-4),
        *_gated(),
        _refuses("a clipped k1-as-loss", lambda: KLConfig(kl_estimator="k1", kl_gradient="own", kl_clip_method="hard")),
    ]


def _slope(method: str, kl: float) -> float:
    x = torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(clip_kl(x, 5.0, method=method), x)  # pyright: ignore[reportArgumentType]
    return slope.item()


def _leak() -> float:
    """How often a KL of .05 with noise .5 passes the threshold .1, by klamp's gate on a fine grid of quantiles."""
    quantiles = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    noisy = 0.05 + 0.5 * torch.special.ndtri(quantiles)
    return clip_gate(noisy, 0.1, method="hard").mean().item()


def _gated() -> list[Check]:
    """Checks the clip inside a whole step, with the exact KL as its gate."""
    world = scene(0, length=2)
    known = [world.truths]

    def gradient(threshold: float, method: str = "hard", **choices: Any) -> Tensor:
        clip = {"kl_clip_method": method, "kl_clip_threshold": threshold}
        clip |= {"kl_clip_temperature": 1e-4} if method == "soft" else {}
        kl = KLConfig(**{"kl_estimator": "exact", "use_per_token_kl_threshold": False, **clip, **choices})
        return examine_config(kl, scene=world).kl.gradient

    return [
        follows("hard clip at 0: no clip", [gradient(0.0)], known, "local"),
        follows("hard clip at 1,000 nats: no pull", [gradient(1000.0)], known, "zero"),
        follows("soft clip far below the KL: no clip", [gradient(1e-3, "soft")], known, "local"),
        follows("in the reward, hard clip at 0: no clip", [gradient(0.0, **IN_REWARD)], known, "reverse"),
        follows("in the reward, hard clip at 1,000 nats: no pull", [gradient(1000.0, **IN_REWARD)], known, "zero"),
        *_gated_by_the_other(),
    ]


def _gated_by_the_other() -> list[Check]:
    """Checks sampled KLs in groups of two: the gate is how often the other one is over budget, times the gradient."""
    world = scene(1, length=2)
    y, known = world.outcomes, [world.truths]
    k3 = kl_estimate(y.policy_logprobs, y.ref_logprobs, estimator="k3").sum(-1).detach()
    over = float(y.probs[k3 > 0.3].sum())
    checks: list[Check] = []
    for name, choices, target in (("in the loss, k3", {}, "local"), ("in the reward, k1", IN_REWARD, "reverse")):
        clip = {"kl_clip_method": "hard", "kl_clip_threshold": 0.3, "use_per_token_kl_threshold": False}
        found = examine_config(KLConfig(**{**clip, **choices}), scene=world).kl.gradient
        claim = f"{name}, hard clip at .3 nats: gated by the other of two"
        checks.append(follows(claim, [found], known, target, factor=over))
    return checks


def prove_controllers() -> list[Check]:
    """Checks what each controller does to beta (step, PPO's, Ziegler's) and refuses."""
    step = [StepController(0.01, target=0.05).update(kl) for kl in (0.08, 0.05, 0.02)]
    ppo = [StepController(1.0, target=0.1, up=2, down=0.5, high=1.5, low=1 / 1.5).update(kl) for kl in (0.2, 0.06)]
    ziegler = ProportionalController(0.2, target=6.0, horizon=10_000)
    return [
        is_equal("step: KL above 1.5 targets", step[0], 0.01 * 1.5),
        is_equal("step: KL on target", step[1], 0.01),
        is_equal("step: KL below half a target", step[2], 0.01 * 0.75),
        is_equal("PPO's rule: doubles above 1.5 targets", ppo[0], 2.0),
        is_equal("PPO's rule: halves below a target / 1.5", ppo[1], 0.5),
        is_equal("proportional: x (1 + 0.2 n / horizon), saturated", ziegler.update(60.0, 256), 0.2 * 1.00512),
        _refuses("proportional: more steps than the horizon", lambda: ziegler.update(6.0, 20_000)),
        _refuses("a KL of NaN", lambda: ziegler.update(math.nan)),
        _refuses("a negative KL (a mean of k1)", lambda: ziegler.update(-0.1)),
    ]


def _refuses(claim: str, act: object) -> Check:
    try:
        result = act()  # pyright: ignore
    except (ConfigError, NonFiniteError) as error:
        return is_true(f"{claim} is refused", True, error.what, expected="refused")
    return is_true(f"{claim} is refused", False, f"accepted: {result}", expected="refused")
