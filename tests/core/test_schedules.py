"""The schedule of beta: held values, continuity at the end of the warm-up, bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.core.schedules import kl_schedule_factor
from klamp.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 1.0),
        ("constant", 100, 1.0),
        ("linear", 0, 1.0),
        ("linear", 25, 0.75 + 0.25 * 0.2),
        ("linear", 100, 0.2),
        ("cosine", 0, 1.0),
        ("cosine", 50, 0.6),
        ("cosine", 25, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        ("cosine", 100, 0.2),
    ],
)
def test_the_factor_has_its_held_values(schedule, step, expected):
    assert kl_schedule_factor(step, 100, schedule=schedule, end=0.2) == pytest.approx(expected, abs=1e-12)


def test_the_warm_up_grows_linearly_from_zero_and_meets_the_schedule():
    factors = [kl_schedule_factor(step, 100, schedule="cosine", warmup_steps=10) for step in range(11)]
    assert factors == pytest.approx([step / 10 for step in range(11)])


def test_without_a_warm_up_the_first_step_has_the_whole_beta():
    assert kl_schedule_factor(0, 10) == 1.0


@given(
    step=st.integers(0, 300),
    total=st.integers(0, 200),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 300),
    end=st.floats(0, 1),
)
def test_the_factor_never_leaves_the_unit_interval(step, total, schedule, warmup, end):
    factor = kl_schedule_factor(step, total, schedule=schedule, warmup_steps=warmup, end=end)
    assert -1e-12 <= factor <= 1 + 1e-12


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_schedules_are_refused():
    with pytest.raises(UnknownNameError, match="cosine"):
        kl_schedule_factor(0, 1, schedule="cosin")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="warmup"):
        kl_schedule_factor(0, 1, warmup_steps=-1)
    with pytest.raises(ConfigError, match="end"):
        kl_schedule_factor(0, 1, end=1.5)
