"""What docs/records/clipping-study.md expects, counted from the corpus of the task: no model, no training."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product
from statistics import fmean

import pytest

from klamp.config import KLConfig, LossConfig
from klamp.tasks.arithmetic import EOS_TOKEN
from klamp.tasks.base_model import CARELESSNESS, HEAVY_COLUMN
from klamp.verify.one_step import Scene, examine_config
from klamp.verify.oracle import gradient_of
from klamp.verify.worlds import random_chain
from studies.fillers import FillerModelConfig

MOST = FillerModelConfig().most_fillers
STOP = [1 / (MOST + 1 - k) for k in range(MOST + 1)]
"""Probability of the first digit after k fillers: all numbers of fillers are equally likely."""


def written(left: int, right: int) -> dict[str, float]:
    """Probability of every answer that the corpus gives to a sum."""
    found: dict[str, float] = defaultdict(float)
    for units_forgotten, tens_forgotten in product((False, True), repeat=2):
        carry, total, probability = 0, 0, 1.0
        for place, forgotten in ((1, units_forgotten), (10, tens_forgotten)):
            column = left // place % 10 + right // place % 10 + carry
            odds = CARELESSNESS * (1.0 if column >= HEAVY_COLUMN else 0.5)
            probability *= (odds if forgotten else 1 - odds) if column > 9 else 1 - forgotten
            carry = int(column > 9 and not forgotten)
            total += column % 10 * place
        found[str(total + 100 * carry)] += probability
    return found


def kls() -> list[tuple[float, float, int]]:
    """(KL of the first digit, KL of the whole answer, its tokens with the end) of a policy that is always right."""
    found = []
    for left, right in product(range(10, 100), repeat=2):
        answers, right_one = written(left, right), str(left + right)
        first = sum(p for answer, p in answers.items() if answer[0] == right_one[0])
        found.append((-math.log(first), -math.log(answers[right_one]), len([*right_one, EOS_TOKEN])))
    return found


def local_equilibrium(first_digit: float) -> float:
    """Mean number of fillers where the odds of one more are those of the reference times exp(KL of the first digit)."""
    mean, still = 0.0, 1.0
    for stop in STOP[:-1]:
        still *= 1 - 1 / (1 + (1 / stop - 1) * math.exp(first_digit))
        mean += still
    return mean


def lowest_mean(answer: float, tokens: float) -> float:
    """Mean number of fillers at the lowest E[KL / length], among policies that tilt the reference's number of them."""

    def at(tilt: float) -> tuple[float, float]:
        weights = [math.exp(tilt * k) for k in range(MOST + 1)]
        shares = [w / sum(weights) for w in weights]
        cost = sum(s * (math.log(s * (MOST + 1)) + answer) / (k + tokens) for k, s in enumerate(shares))
        return cost, sum(k * s for k, s in enumerate(shares))

    return min(at(step / 100) for step in range(-100, 200))[1]


def rest_of_the_term(answer: float, tokens: float) -> float:
    """Mean number of fillers where the term itself is at rest: horizon `sequence`, each completion over its length.

    From the last filler backwards: at rest, stopping and going on have the same mean of (KL from here on) / length.
    """
    later, inverse, mean = answer / (MOST + tokens), 1 / (MOST + tokens), 0.0
    for k in reversed(range(MOST)):
        low, high = 1e-9, 1 - 1e-9
        for _ in range(100):
            s = (low + high) / 2
            now = (math.log(s / STOP[k]) + answer) / (k + tokens)
            on = math.log((1 - s) / (1 - STOP[k])) * inverse + later
            low, high = (s, high) if now < on else (low, s)
        later, inverse = s * now + (1 - s) * on, s / (k + tokens) + (1 - s) * inverse
        mean = (1 - s) * (1 + mean)
    return mean


@pytest.mark.slow
def test_what_the_page_counts() -> None:
    every = kls()
    assert len(every) == 8100
    first, whole, tokens = (fmean(row[i] for row in every) for i in range(3))
    assert (first, whole) == pytest.approx((0.39, 0.58), abs=0.005)
    assert MOST / 2 + tokens == pytest.approx(7.6, abs=0.05)
    assert fmean(p[str(a + b)] for a, b in product(range(10, 100), repeat=2) for p in [written(a, b)]) > 0.62


@pytest.mark.slow
def test_equilibria_of_the_page() -> None:
    assert local_equilibrium(0.0) == pytest.approx(4.0), "nothing to put off: the reference's own number"
    assert fmean(local_equilibrium(first) for first, _, _ in kls()) == pytest.approx(4.8, abs=0.06)
    assert lowest_mean(0.58, 3.6) == pytest.approx(5.2, abs=0.03)
    assert rest_of_the_term(0.0, 3.6) == pytest.approx(4.0)
    assert rest_of_the_term(0.58, 3.6) == pytest.approx(4.44, abs=0.01)


@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_the_sequence_horizon_over_the_own_length_is_not_the_gradient_of_that_mean(estimator: str) -> None:
    """1 / length depends on every token, so the KL of the tokens before one is no baseline of its gradient."""
    cosines = []
    for seed in range(5):
        world = Scene(chain=random_chain(seed, length=3), group_size=1)
        kl, loss = KLConfig(kl_estimator=estimator, kl_horizon="sequence"), LossConfig(loss_type="grpo")
        y = world.outcomes
        spent = (y.policy_logprobs - y.ref_logprobs).sum(-1) / world.lengths
        honest = gradient_of((y.policy_logprobs.sum(-1).exp() * spent).sum(), world.chain)
        term = examine_config(kl, loss, scene=world).kl.gradient
        cosines.append(((term * honest).sum() / term.norm() / honest.norm()).item())
    assert min(cosines) == pytest.approx({"k1": 0.861, "k3": 0.872, "exact": 0.713}[estimator], abs=1e-3)
    assert max(cosines) < 0.985
