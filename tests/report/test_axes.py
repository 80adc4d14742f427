"""Axes and their ticks; long curves keep their spikes."""

from __future__ import annotations

import math

import pytest

from klamp.report.axes import Axis, fit, means, thin, ticks


def test_a_linear_axis_and_round_ticks() -> None:
    scale = Axis(low=-1, high=3)
    assert [scale(value) for value in (-1, 0, 1, 3)] == [0, 0.25, 0.5, 1]
    assert ticks(scale, most=4) == [-1, 0, 1, 2, 3]
    assert ticks(Axis(low=0, high=1)) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(Axis(low=0, high=1.03)) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(Axis(low=0, high=0.37)) == [0, 0.1, 0.2, 0.3]
    assert ticks(Axis(low=3.2, high=3.9)) == [3.2, 3.4, 3.6, 3.8]
    assert ticks(Axis(low=1, high=120)) == [25, 50, 75, 100]


def test_everything_is_on_the_axis() -> None:
    scale = fit([0.2, math.nan, 0.4, math.inf], include=(0.0,))
    assert (scale.low, scale.knee) == (0.0, None)
    assert scale.high == pytest.approx(0.42)
    low = fit([-0.5, 0.5])
    assert low.low == pytest.approx(-0.55) and low.high == pytest.approx(0.55)


@pytest.mark.parametrize(("value", "low", "high"), [(0.01, 0, 0.015), (0.0, 0, 1), (-2.0, -3, -1)])
def test_a_constant_gets_an_axis_too(value: float, low: float, high: float) -> None:
    scale = fit([value] * 5)
    assert (scale.low, scale.high) == pytest.approx((low, high))
    assert fit([]) == fit([0.0, 1.0])


def test_a_spike_bends_the_axis() -> None:
    values = [0.02, 0.03, 0.03, 0.03, 0.04, 1e5]
    scale = fit(values, include=(0.0,))
    assert scale.knee == pytest.approx(0.02)
    assert 0 == scale(0.0) < scale(0.03) < scale(1.0) < scale(1e5) == 1
    assert scale(0.03) > 0.05, "which a linear axis shows at 3e-7"
    assert ticks(scale, most=4)[0] == 0 and ticks(scale, most=4)[-1] == 1e5
    assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in ticks(scale)[1:])


def test_no_axis_bends_for_many_zeros_or_below_a_level_that_is_shown_and_extremes_do_not_overflow() -> None:
    assert fit([0.1, 0.1, 0.05, *[1e-13] * 6], include=(0.0,)).knee is None
    quiet = [1e-9] * 6
    assert fit([*quiet, 1e-5], include=(0.01,)).knee is None
    assert fit([*quiet, 1.0], include=(0.01,)).knee is not None
    scale = fit([1e300, 1.0, 2.0, 1.0, 1.0, 2.0, -1.0, 1.0, -1e300])
    assert 0 <= scale(1e90) <= 1 and ticks(scale)


def test_short_curves_stay_and_long_ones_lose_points_but_no_extreme() -> None:
    assert thin([{1: 0.0, 2: 1.0}, {2: 0.0, 5: 0.0}], most=10) == [1, 2, 5]
    assert thin([], most=10) == []
    curve = {step: math.sin(step / 500) for step in range(1, 10001)}
    curve[7321] = 100.0
    curve[123] = -100.0
    other = dict.fromkeys(curve, 0.5) | {5000: math.nan}
    kept = thin([curve, other], most=200)
    assert {1, 10000, 7321, 123, 5000} <= set(kept)
    assert 100 <= len(kept) <= 2 * 200 + 10
    assert kept == sorted(kept)
    shown = [curve[step] for step in kept if step not in (7321, 123)]
    assert max(shown) == max(value for step, value in curve.items() if step != 7321)


def test_the_means_of_stretches_stand_beside_the_extremes() -> None:
    noise = {step: float(step % 10 == 0) * 10 for step in range(1, 1001)}
    holes = {step: math.nan if step < 600 else 2.0 for step in range(1, 1001)}
    found = means([noise, holes], most=100)
    assert len(found) == 50 and [values[0] for _, values in found] == [1.0] * 50, "not that of the extremes, 5"
    assert found[0] == (10.5, [1.0, None]) and found[-1] == (990.5, [1.0, 2.0])
    assert means([{1: 0.0, 2: 1.0}], most=10) == [], "nothing is left out"
    assert means([dict.fromkeys(range(20), 1e308)], most=10)[0][1] == [1e100], "no sum overflows"
