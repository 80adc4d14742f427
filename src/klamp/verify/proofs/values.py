"""Checks of the values: mean, noise and sign of each estimator, for tokens of the policy."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS, exact_kl, kl_estimate
from klamp.core.types import Estimator
from klamp.verify.oracle import Loss, expected, reverse_kl, variance
from klamp.verify.proofs.check import Check, is_equal, is_true
from klamp.verify.worlds import Chain, Outcomes, enumerate_outcomes, one_position, random_chain, truncate_top_p

NAMES: tuple[Estimator, ...] = get_args(Estimator)
UNBIASED: tuple[Estimator, ...] = ("k1", "k3")


def prove_values() -> list[Check]:
    """Checks bias, sign and support of the estimators and of the exact KL."""
    return [*_bias(), *_signs(), *_exact(), *_truncated()]


def prove_gaussians() -> list[Check]:
    """Checks Schulman's formulas for N(0, 1) sampled against N(m, 1), by numerical integration.

    Source: http://joschu.net/blog/kl-approx.html
    """
    checks: list[Check] = []
    for m in (0.1, 1.0):
        mean, spread = {}, {}
        for name in ("k1", "k2", "k3"):
            mean[name], spread[name] = _moments(name, m)
        checks += [
            is_equal(f"Gaussians {m:g} apart: E[k1] = m^2/2", mean["k1"], m**2 / 2),
            is_equal(f"Gaussians {m:g} apart: E[k3] = m^2/2", mean["k3"], m**2 / 2),
            is_equal(f"Gaussians {m:g} apart: E[k2] - KL = m^4/8", mean["k2"] - m**2 / 2, m**4 / 8),
            is_equal(f"Gaussians {m:g} apart: Var k1 = m^2", spread["k1"], m**2),
            is_equal(f"Gaussians {m:g} apart: Var k2 = m^4/2 + m^6/4", spread["k2"], m**4 / 2 + m**6 / 4),
            is_equal(f"Gaussians {m:g} apart: Var k3 = exp(m^2) - 1 - m^2", spread["k3"], math.expm1(m**2) - m**2),
        ]
    noise = {kl: [_moments(name, math.sqrt(2 * kl))[1] for name in ("k1", "k3")] for kl in (0.62, 0.64)}
    crossed = noise[0.62][1] < noise[0.62][0] and noise[0.64][1] > noise[0.64][0]
    ratios = f"Var k3/Var k1 = {noise[0.62][1] / noise[0.62][0]:.3f}, then {noise[0.64][1] / noise[0.64][0]:.3f}"
    checks.append(
        is_true(
            "Gaussian log-ratios: k3 is noisier than k1 beyond 0.63 nats",
            crossed,
            ratios,
            expected="crossed at 0.62..0.64",
        )
    )
    return checks


def estimate(name: Estimator) -> Loss:
    """One of klamp's estimators as a loss of enumerated completions."""

    def loss(y: Outcomes) -> Tensor:
        return kl_estimate(y.policy_logprobs, y.ref_logprobs, estimator=name)

    return loss


def _worlds() -> list[Chain]:
    return [random_chain(seed, vocab=4, length=1, eos=None) for seed in range(3)] + [random_chain(3)]


def _bias() -> list[Check]:
    checks: list[Check] = []
    for name in UNBIASED:
        errors = [(expected(chain, estimate(name)) - reverse_kl(chain)).abs().item() for chain in _worlds()]
        checks.append(is_equal(f"E[{name}] - KL(policy||ref)", max(errors), 0.0))
    over = min((expected(chain, estimate("abs")) / reverse_kl(chain)).item() for chain in _worlds())
    checks.append(is_true("abs over-estimates", over > 1.0, f"at least {over:.3g} times KL(policy||ref)"))
    near, nearer = (_bias_near(size) for size in (0.02, 0.01))
    checks.append(is_equal("k2's bias is of third order: at half the distance 1/8", near / nearer, 8.0, tolerance=0.15))
    return checks


def _bias_near(size: float) -> float:
    """The bias of k2 where the reference is near the policy."""
    policy = random_chain(0, vocab=4, length=1, eos=None).policy_logits.detach()[0]
    direction = random_chain(1, vocab=4, length=1, eos=None).policy_logits.detach()[0]
    chain = one_position(policy, policy + size * direction)
    return (expected(chain, estimate("k2")) - reverse_kl(chain)).item()


def _signs() -> list[Check]:
    checks: list[Check] = []
    for name in NAMES:
        rows = [enumerate_outcomes(chain) for chain in _worlds()]
        lowest = min(kl_estimate(y.policy_logprobs, y.ref_logprobs, estimator=name)[y.mask].min().item() for y in rows)
        non_negative = ESTIMATORS[name].non_negative
        words = "never negative" if non_negative else "of either sign"
        checks.append(
            is_true(f"{name} is {words}", (lowest >= 0) == non_negative, f"lowest {lowest:.3g}", expected=words)
        )
    return checks


def _exact() -> list[Check]:
    def exact(y: Outcomes) -> Tensor:
        return exact_kl(y.policy_logits, y.ref_logits)

    one, chain = random_chain(4, vocab=5, length=1, eos=None), random_chain(5)
    return [
        is_equal("exact at one position: no noise", variance(one, exact), 0.0),
        is_equal("exact at one position - KL(policy||ref)", expected(one, exact) - reverse_kl(one), 0.0),
        is_equal("exact summed over sampled prefixes: unbiased", expected(chain, exact) - reverse_kl(chain), 0.0),
    ]


def _truncated() -> list[Check]:
    """Checks top-p sampling, which removes tokens from the policy's support that the reference still has."""
    full = random_chain(6, vocab=5, length=1, eos=None)
    chain = one_position(truncate_top_p(full.policy_logits.detach()[0], 0.7), full.ref_logits[0])
    kept = chain.policy_logits.detach()[0] > -torch.inf
    lost = chain.logprobs("ref")[0].exp()[~kept].sum().item()
    low = (expected(chain, estimate("k3")) - reverse_kl(chain)).item()
    k1 = expected(chain, estimate("k1")) - reverse_kl(chain)
    return [
        is_equal("top-p sampling: k3 is low by the reference's lost mass", low, -lost),
        is_equal("top-p sampling: k1 stays unbiased", k1, 0.0),
    ]


def _moments(name: Estimator, m: float) -> tuple[float, float]:
    """Mean and variance of an estimator for N(0, 1) sampled and N(m, 1) as the reference."""
    x = torch.linspace(-14, 14, 28_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    values = kl_estimate(-(x**2) / 2, -((x - m) ** 2) / 2, estimator=name)
    mean = (density * values).sum()
    return mean.item(), (density * (values - mean) ** 2).sum().item()
