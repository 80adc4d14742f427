"""Long curves keep their spikes."""

from __future__ import annotations

import math

from klamp.report.points import thin


def test_short_curves_stay() -> None:
    assert thin([{1: 0.0, 2: 1.0}, {2: 0.0, 5: 0.0}], most=10) == [1, 2, 5]
    assert thin([], most=10) == []


def test_long_ones_lose_points_but_no_extreme() -> None:
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
