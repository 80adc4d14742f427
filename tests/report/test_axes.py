"""Long curves keep their spikes, and their means."""

from __future__ import annotations

import math

from klamp.report.axes import means, thin


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
