"""What a run itself shows of why something went wrong, with a remedy each, the likeliest first.

A cause is looked for in the steps up to the alarm and comes with the number that shows it. What shows nothing is not
named: a run whose curves point nowhere has no cause here, only what the alarm says in general.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias

from klamp.diagnostics.alarm import Limit, number
from klamp.diagnostics.history import LARGEST, History

Cause: TypeAlias = Callable[[History], tuple[float, str] | None]
"""Looks for one cause: how many times its threshold the run shows it, and the text; None: not at all."""

MISMATCH = Limit(value=0.01, unit="nats per token, k1 or k3", source="seen in the field: healthy about .002")
"""Distance of sampler and policy that is out of order."""
WINDOW = 30
"""Steps that are searched for a cause."""
BY_NOISE = 10
"""Steps from which a jump has to stand out of the curve's own scatter."""
JUMP = 0.15
"""Nats per token that one step moves a policy by where its learning rate is too high; healthy runs stay below 0.05."""
FARTHEST = 20.0
"""Nats per token, more than a policy is from a reference whose every token is as likely as one in 100 million."""
WEAK_PULL = 0.05
"""The KL's pull, as a share of the reward's, below which it holds nothing back."""
PAYS = Limit(
    value=0.3,
    unit="correlation of reward and length within groups, mean of 10 steps",
    source="klamp's choice: right answers are no longer than wrong ones, mostly shorter",
)
REPEATED = Limit(
    value=0.5,
    unit="of the tokens stand in a pair of tokens that was in the completion before, mean of 5 steps",
    source="klamp's choice; 'majestic majestic majestic' has .9, a sentence of 24 tokens hardly any",
)


def likely_causes(history: History, *looked_for: Cause) -> list[str]:
    """The texts of the causes that the run shows, the most strongly shown first.

    Args:
        history: the run up to the alarm.
        looked_for: the causes that can lead to this alarm.
    """
    found = [each for each in (cause(history) for cause in looked_for) if each is not None]
    return [text for _, text in sorted(found, key=lambda each: -each[0])]


def last_jump(history: History) -> tuple[float, str] | None:
    """Shows where the last step may have moved the policy far; the next one tells."""
    return _rate(history, next((b - a for a, b in pairwise(history.kl(2))), 0.0), ", if the KL stays there")


def learning_rate(history: History) -> tuple[float, str] | None:
    """Shows where single steps moved the policy far, and it stayed there: the learning rate is too high."""
    kl = history.kl(WINDOW)
    largest = max((min(b, c) - a for a, b, c in zip(kl, kl[1:], kl[2:], strict=False)), default=0.0)
    bends = [a - 2 * b + c for a, b, c in zip(kl, kl[1:], kl[2:], strict=False)]  # a slope has none, noise has sqrt(6)
    scattered = len(kl) > BY_NOISE and largest < 4 * (fmean(x * x for x in bends) / 6) ** 0.5
    return None if scattered else _rate(history, largest, "")


def _rate(history: History, largest: float, if_so: str) -> tuple[float, str] | None:
    if largest <= JUMP:
        return None
    if largest > FARTHEST:
        text = (
            f"a few tokens, or numbers that are wrong: {number(largest)} nats per token is farther than a policy "
            "moves. k3 is exponential in single log-ratios: bound them (kl_max_log_ratio), and check mask and shift"
        )
        return 1.0, text
    rates = history.last("train/learning_rate", WINDOW)
    rate = f" (up to {number(max(rates))})" if rates else ""
    text = (
        f"the learning rate{rate}{if_so}: the KL rose by {number(largest)} nats per token from one logged step to the "
        "next. Take a tenth of it, or lower max_grad_norm"
    )
    return largest / JUMP, text


def weak_kl(history: History) -> tuple[float, str] | None:
    """Shows where the KL pulls with a small part of the reward's strength, or there is none."""
    if history.latest.get("beta", history.settings.beta) == 0:
        return 1.0, "no KL to a reference holds the policy (beta is 0). Set beta, or target_kl, which finds one"
    found = kl_pull(history, WINDOW)
    if found is None or found >= WEAK_PULL:
        return None
    beta, more = history.last("beta", 1), "Raise beta" if history.settings.target_kl is None else "Lower target_kl"
    at = f" at beta {number(beta[0])}" if beta else ""
    text = f"the KL hardly holds the policy: it pulls with {100 * found:.2g} % of the reward's strength{at}. {more}"
    return min(WEAK_PULL / max(found, 1e-12), 3.0), text


def pays_for_length(history: History) -> tuple[float, str] | None:
    """Shows where longer completions of a prompt earn more."""
    values = history.last("length/reward_correlation", WINDOW)
    if not values or fmean(values) < PAYS.value:
        return None
    text = (
        f"the reward pays for length: within groups the two correlate by {fmean(values):.2f}. Score the answer alone, "
        "or let length cost something"
    )
    return fmean(values) / PAYS.value, text


def repeats(history: History) -> tuple[float, str] | None:
    """Shows where completions say the same words over and over."""
    values = history.last("length/repeated", 5)
    if not values or fmean(values) < REPEATED.value:
        return None
    text = (
        f"completions repeat themselves ({100 * fmean(values):.0f} % of their tokens stand in a pair that was there "
        "before). Let the reward count each word once, or hold the KL"
    )
    return fmean(values) / REPEATED.value, text


def stale_sampler(history: History) -> tuple[float, str] | None:
    """Shows where the tokens are not the policy's own."""
    values = history.last("sampler/k3", 5)
    if not values or fmean(values) <= MISMATCH.value:
        return None
    text = (
        f"the sampler is not the policy ({number(fmean(values))} nats per token apart): see what sampler-mismatch says"
    )
    return min(fmean(values) / MISMATCH.value, 5.0), text


def kl_pull(history: History, steps: int) -> float | None:
    """How strongly the KL pulls back, as a share of the reward's pull: 1 at the optimum. None where that is not known.

    Equation: price * sqrt(2 * KL) / s, for a policy ref * exp(t * reward) to second order in t: its KL is t^2 s^2 / 2
    nats per completion (s: standard deviation of the reward within groups), and the KL's gradient is price * t times
    that of the reward.
    """
    kl = _mean_of(history, steps, "kl/exact_sequence", "kl/k3_sequence")
    price, spread = _mean_of(history, steps, "beta/price"), spread_within_groups(history, steps)
    if kl is None or price is None or spread is None:
        return None
    return price * (2 * max(kl, 0.0)) ** 0.5 / spread


def spread_within_groups(history: History, steps: int) -> float | None:
    """The standard deviation of the reward within the groups that have one, mean over steps; None: none has, or it is
    not logged."""
    found: list[float] = []
    for row in history.rows[-steps:]:
        spread, active = row.metrics.get("reward_std", 0.0), 1 - row.metrics.get("groups/saturated", 0.0)
        if 0 < spread < LARGEST and 0 < active <= 1:
            found.append(spread / active)
    return fmean(found) if found else None


def _mean_of(history: History, steps: int, *names: str) -> float | None:
    """The mean of the first of these metrics that the latest step has, over the last steps."""
    name = next((name for name in names if name in history.latest), None)
    values = history.last(name, steps) if name else []
    return fmean(values) if values else None
