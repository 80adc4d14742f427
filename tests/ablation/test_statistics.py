"""Intervals and comparisons with the control: against the enumeration of every resample, closed
forms, scipy's tests, simulation."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from klamp.ablation.statistics import Interval, bootstrap_interval, compare, holm


def enumerated(values: Sequence[float]) -> list[float]:
    """The mean of every one of the n^n equally likely resamples, sorted."""
    return sorted(mean(draw) for draw in itertools.product(values, repeat=len(values)))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("values", [(0.81, 0.84, 0.92), (-3.0, 0.0, 10.0), (0.2, 0.4, 0.5, 0.9)])
def test_few_seeds_give_the_quantiles_of_all_resamples(values: tuple[float, ...]) -> None:
    ordered = enumerated(values)
    found = bootstrap_interval(values)
    assert found is not None
    assert found.low == pytest.approx(quantile(ordered, 0.025))
    assert found.high == pytest.approx(quantile(ordered, 0.975))


@pytest.mark.parametrize(("seeds", "share"), [(2, 0.5), (3, 0.75), (5, 0.83)])
def test_few_seeds_are_as_rough_as_the_docstring_says(seeds: int, share: float) -> None:
    draw, tries, held = random.Random(1), 200, 0
    for _ in range(tries):
        found = bootstrap_interval([draw.gauss(0.0, 1.0) for _ in range(seeds)])
        held += found is not None and found.low <= 0 <= found.high
    assert held / tries == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / tries))


def test_one_value_has_no_interval_and_equal_ones_no_width() -> None:
    assert bootstrap_interval([]) is None
    assert bootstrap_interval([0.3]) is None
    assert bootstrap_interval([0.3, 0.3, 0.3]) == Interval(0.3, 0.3)
    values = [0.1, 0.4, 0.35, 0.8, 0.77]
    assert bootstrap_interval(values) == bootstrap_interval(values), "the resamples are the same each time"


A, B = {0: 0.80, 1: 0.84, 2: 0.86, 3: 0.81}, {0: 0.83, 1: 0.85, 2: 0.90, 3: 0.88}


def test_one_arm_against_the_control_is_the_paired_t_test() -> None:
    found = compare({"a": A, "b": B}, control="a")["b"]
    theirs = stats.ttest_rel(list(B.values()), list(A.values()))
    assert found.p == pytest.approx(theirs.pvalue)
    assert found.interval == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert found.mean == pytest.approx(np.mean(list(B.values())) - np.mean(list(A.values())))


def test_the_sign_is_arm_minus_control_and_seeds_are_matched_by_their_number() -> None:
    found = compare({"a": {3: 1.0, 1: 2.0, 9: 0.0}, "b": {1: 2.5, 3: 1.2, 7: 0.0}}, control="a")["b"]
    assert found.differences == pytest.approx((0.5, 0.2))


def test_holm_against_its_definition() -> None:
    """An arm is rejected at a level where every smaller p, counted from the smallest, is below level / (m - k + 1)."""
    draw = random.Random(0)
    for _ in range(50):
        ps = [draw.random() ** 3 for _ in range(4)]
        corrected = holm(ps)
        for level in (0.01, 0.05, 0.2):
            rejected: set[int] = set()
            for k, index in enumerate(sorted(range(4), key=ps.__getitem__)):
                if ps[index] * (4 - k) >= level:
                    break
                rejected.add(index)
            assert {i for i, p in enumerate(corrected) if p < level} == rejected
    assert holm([]) == []


def test_more_arms_need_more_evidence() -> None:
    alone = compare({"a": A, "b": B}, control="a")["b"]
    among = compare(
        {"a": A, "b": B, **{f"{i}": {s: x + 0.01 * (s == i) for s, x in A.items()} for i in range(3)}}, control="a"
    )
    assert alone.p is not None and among["b"].p is not None and among["b"].p > alone.p


@pytest.mark.parametrize("differences", [(0.0, 0.0, 0.0), (1.0, 1.0), (0.1, 0.1, 0.1 + 1e-17)])
def test_without_a_spread_there_is_no_test(differences: tuple[float, ...]) -> None:
    arms = {"a": dict.fromkeys(range(len(differences)), 0.0), "b": dict(enumerate(differences))}
    found = compare(arms, control="a")["b"]
    assert (found.p, found.interval) == (None, None)


def test_an_arm_with_one_common_seed_is_left_out() -> None:
    assert compare({"a": A, "b": {0: 1.0, 9: 2.0}}, control="a") == {}
