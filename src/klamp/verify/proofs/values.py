"""Checks of the values: mean, noise and sign of each estimator, and thirty nats away in every number type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS, kl_estimate
from klamp.core.gradients import kl_penalty
from klamp.core.types import Gradient
from klamp.verify.judge import DTYPES, FAR, exact, judge_value, one_token
from klamp.verify.oracle import Followed, Loss, expected, expected_pull, in_reward, reverse_kl, variance
from klamp.verify.proofs.check import Check, is_equal, is_true
from klamp.verify.worlds import Chain, enumerate_outcomes, one_position, random_chain, random_positions, truncate_top_p


def prove_values() -> list[Check]:
    """Checks bias, sign and support of the estimators and of the exact KL."""
    return [*_estimators(), *_exact(), *_truncated()]


def prove_gaussians() -> list[Check]:
    """Checks Schulman's formulas for N(0, 1) sampled against N(m, 1), by numerical integration.

    Source: http://joschu.net/blog/kl-approx.html
    """
    checks: list[Check] = []
    for m in (0.1, 1.0):
        (k1, var_k1), (k2, var_k2), (k3, var_k3) = (_moments(name, m) for name in ("k1", "k2", "k3"))
        claims = {
            "E[k1] = m^2/2": (k1, m**2 / 2),
            "E[k3] = m^2/2": (k3, m**2 / 2),
            "E[k2] - KL = m^4/8": (k2 - m**2 / 2, m**4 / 8),
            "Var k1 = m^2": (var_k1, m**2),
            "Var k2 = m^4/2 + m^6/4": (var_k2, m**4 / 2 + m**6 / 4),
            "Var k3 = exp(m^2) - 1 - m^2": (var_k3, math.expm1(m**2) - m**2),
        }
        checks += [is_equal(f"Gaussians {m:g} apart: {claim}", *numbers) for claim, numbers in claims.items()]
    before, after = (_moments("k3", math.sqrt(2 * kl))[1] / _moments("k1", math.sqrt(2 * kl))[1] for kl in (0.62, 0.64))
    claim, ratios = "Gaussian log-ratios: k3 is noisier than k1 beyond 0.63 nats", f"{before:.3f}, then {after:.3f}"
    text, crossed = f"Var k3/Var k1 = {ratios}", "crossed at 0.62..0.64"
    return [*checks, is_true(claim, before < 1 < after, text, expected=crossed)]


def estimate(name: str) -> Loss:
    """One of klamp's estimators as a loss of enumerated completions."""
    return lambda y: kl_estimate(y.policy_logprobs, y.ref_logprobs, estimator=name)  # pyright: ignore


def _estimators() -> Iterator[Check]:
    worlds = [*random_positions(3, vocab=4), random_chain(3)]
    for name in (name for name, row in ESTIMATORS.items() if row.bias.startswith("unbiased")):
        errors = [_bias_of(name, chain).abs().item() for chain in worlds]
        yield is_equal(f"E[{name}] - KL(policy||ref)", max(errors), 0.0)
    over = min((expected(chain, estimate("abs")) / reverse_kl(chain)).item() for chain in worlds)
    yield is_true("abs over-estimates", over > 1.0, f"at least {over:.3g} times KL(policy||ref)")
    policy, direction = (chain.policy_logits.detach()[0] for chain in random_positions(2, vocab=4))
    near, nearer = (_bias_of("k2", one_position(policy, policy + size * direction)) for size in (0.02, 0.01))
    yield is_equal("k2's bias is of third order: at half the distance 1/8", near / nearer, 8.0, tolerance=0.15)
    for name, row in ESTIMATORS.items():
        lowest = min(estimate(name)(y)[y.mask].min().item() for y in map(enumerate_outcomes, worlds))
        words = "never negative" if row.non_negative else "of either sign"
        yield is_true(f"{name} is {words}", (lowest >= 0) == row.non_negative, f"lowest {lowest:.3g}", expected=words)


def _bias_of(name: str, chain: Chain) -> Tensor:
    return expected(chain, estimate(name)) - reverse_kl(chain)


def _exact() -> list[Check]:
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
    lost = chain.logprobs("ref")[0].exp()[chain.policy_logits[0].isneginf()].sum().item()
    low = (expected(chain, estimate("k3")) - reverse_kl(chain)).item()
    k1 = expected(chain, estimate("k1")) - reverse_kl(chain)
    return [
        is_equal("top-p sampling: k3 is low by the reference's lost mass", low, -lost),
        is_equal("top-p sampling: k1 stays unbiased", k1, 0.0),
    ]


def _moments(name: str, m: float) -> tuple[float, float]:
    """Mean and variance of an estimator for N(0, 1) sampled and N(m, 1) as the reference."""
    x = torch.linspace(-14, 14, 28_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    values = ESTIMATORS[name].value(-(x**2) / 2 + (x - m) ** 2 / 2)
    mean = (density * values).sum()
    return mean.item(), (density * (values - mean) ** 2).sum().item()


def prove_numerics() -> list[Check]:
    """Checks log-ratios of +-30 nats, and masked positions that hold -inf and NaN."""
    return [*_reverse_slopes(), *_forward_slopes(), *_masked(), _cancellation()]


def _reverse_slopes() -> Iterator[Check]:
    """Checks gradient='reverse': the slope at one token is its log-ratio, for every value."""
    for name, dtype in DTYPES.items():
        slopes = {delta: {_slope(value, "reverse", dtype, delta) for value in ESTIMATORS} for delta in (FAR, -FAR)}
        text = " and ".join("/".join(f"{slope:+g}" for slope in sorted(ends)) for ends in slopes.values())
        right = all(ends == {delta} for delta, ends in slopes.items())
        yield is_true(f"{name}, +-30 nats, gradient reverse", right, f"slopes {text}", expected="slopes +30 and -30")


def _forward_slopes() -> Iterator[Check]:
    """Checks gradient='forward': 1 - ref/policy, which float16 holds only where the log-ratio is bounded."""
    for name, dtype in DTYPES.items():
        bound = 10.0 if name == "float16" else None
        slopes = [_slope("k3", "forward", dtype, delta, bound) for delta in (FAR, -FAR)]
        wanted = [-math.expm1(-(bound or FAR)), -math.expm1(bound or FAR)]
        right = all(abs(got / want - 1) < 5e-3 for got, want in zip(slopes, wanted, strict=True))
        claim = f"{name}, +-30 nats, gradient forward{', kl_max_log_ratio 10' if bound else ''}"
        got, want = (f"slopes {above:+.3g} and {below:+.3g}" for above, below in (slopes, wanted))
        yield is_true(claim, right, got, expected=want)


def _masked() -> Iterator[Check]:
    """Checks that masked positions reach neither value nor gradient, for any number in them."""
    for poison in (-math.inf, math.nan):
        policy = torch.tensor([[-1.0, poison]], requires_grad=True)
        ref, mask = torch.tensor([[-2.0, poison]]), torch.tensor([[True, False]])
        total = kl_penalty(policy, ref, mask).sum()
        (slope,) = torch.autograd.grad(total, policy)
        finite = bool(total.isfinite() and slope.isfinite().all() and slope[0, 1] == 0)
        yield is_true(f"a masked {poison} changes nothing", finite, f"slopes {slope.tolist()[0]}")


def _cancellation() -> Check:
    """Checks that differentiating w * k3 in float32 loses the gradient far away, and that klamp's form keeps it."""
    policy, ref = torch.tensor([[-20.0]], requires_grad=True), torch.tensor([[0.0]])
    delta = policy - ref
    naive = (policy - policy.detach()).exp() * (torch.exp(-delta) - 1 + delta)
    (lost,) = torch.autograd.grad(naive.sum(), policy)
    own = _slope("k3", "reverse", torch.float32, -20.0)
    right = abs(lost.item() + 20.0) > 1.0 and own == -20.0
    text = f"klamp {own:+g}, w k3 differentiated {lost.item():+g}"
    return is_true("float32, -20 nats: klamp keeps what w k3 loses", right, text, expected="klamp -20")


def _slope(
    value: str, gradient: Gradient, dtype: torch.dtype, delta: float, max_log_ratio: float | None = None
) -> float:
    """d penalty / d log policy of one token; NaN where the penalty is not finite."""
    choices = {"value": value, "gradient": gradient, "max_log_ratio": max_log_ratio}
    penalty = partial(kl_penalty, mask=torch.ones(1, 1, dtype=torch.bool), **choices)
    total, slope = one_token(penalty, dtype, delta)
    return slope if math.isfinite(total) else math.nan


class EstimatorFacts(NamedTuple):
    """The measured properties of one estimator, tokens of the policy, at a KL of about 0.9 nats per token."""

    name: str
    formula: str  # in terms of delta = log policy - log ref
    bias: float  # the expected value minus KL(policy||ref), divided by KL(policy||ref)
    deviation: float  # standard deviation of one token's value, in units of the KL
    lowest: float  # of any token's value, in nats
    as_loss: Followed  # the divergence whose gradient it follows if it is differentiated
    in_reward: Followed  # and if it is taken from the reward

    @property
    def bias_text(self) -> str:
        """The bias as text: `unbiased`, or in percent."""
        return "unbiased" if abs(self.bias) < 1e-9 else f"{100 * self.bias:+.0f} %"


def measure_estimators() -> list[EstimatorFacts]:
    """Every estimator, and the exact KL over the vocabulary, in the oracle's one-position worlds."""
    losses = {name: (row.formula, estimate(name)) for name, row in ESTIMATORS.items()}
    chains, facts = random_positions(3), list[EstimatorFacts]()
    for name, (formula, loss) in {**losses, "exact": ("sum_v policy_v delta_v", exact)}.items():
        value = judge_value(loss, chains)
        deviation = value.standard_deviation / value.reverse_kl
        followed = (expected_pull(chains, use).follows for use in (loss, in_reward(loss)))
        facts.append(EstimatorFacts(name, formula, value.relative_bias, deviation, value.lowest, *followed))
    return facts
