"""Checks of the clips: their values and gates, and how often a clip of one sampled KL is open by mistake."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from klamp.config import KLConfig
from klamp.core.clipping import clip_gate, clip_kl, kl_budget
from klamp.core.estimators import kl_estimate
from klamp.errors import ConfigError
from klamp.verify.one_step import examine_config, scene
from klamp.verify.proofs.check import Check, follows, is_equal, is_true


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
        _refused(),
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

    reward = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}

    return [
        follows("hard clip at 0: no clip", [gradient(0.0)], known, "local"),
        follows("hard clip at 1,000 nats: no pull", [gradient(1000.0)], known, "zero"),
        follows("soft clip far below the KL: no clip", [gradient(1e-3, "soft")], known, "local"),
        follows("in the reward, hard clip at 0: no clip", [gradient(0.0, **reward)], known, "reverse"),
        follows("in the reward, hard clip at 1,000 nats: no pull", [gradient(1000.0, **reward)], known, "zero"),
        *_gated_by_the_other(),
    ]


def _gated_by_the_other() -> list[Check]:
    """Checks sampled KLs in groups of two: the gate is how often the other one is over budget, times the gradient."""
    world = scene(1, length=2)
    y, known = world.outcomes, [world.truths]
    k3 = kl_estimate(y.policy_logprobs, y.ref_logprobs, estimator="k3").sum(-1).detach()
    over = float(y.probs[k3 > 0.3].sum())
    in_reward = {"kl_estimator": "k1", "kl_placement": "reward", "kl_horizon": "sequence"}
    checks: list[Check] = []
    for name, choices, target in (("in the loss, k3", {}, "local"), ("in the reward, k1", in_reward, "reverse")):
        clip = {"kl_clip_method": "hard", "kl_clip_threshold": 0.3, "use_per_token_kl_threshold": False}
        found = examine_config(KLConfig(**{**clip, **choices}), scene=world).kl.gradient
        claim = f"{name}, hard clip at .3 nats: gated by the other of two"
        checks.append(follows(claim, [found], known, target, factor=over))
    return checks


def _refused() -> Check:
    try:
        KLConfig(kl_estimator="k1", kl_gradient="own", kl_clip_method="hard")
    except ConfigError as error:
        return is_true("a clipped k1-as-loss is refused", True, error.what, expected="refused")
    return is_true("a clipped k1-as-loss is refused", False, "accepted", expected="refused")
