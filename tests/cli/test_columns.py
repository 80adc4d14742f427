"""Numbers, columns, curves and scores as they are written."""

from __future__ import annotations

import pytest

from klamp.cli.columns import (
    COLUMNS,
    GAP,
    STEP_WIDTH,
    ScoreScale,
    columns_for,
    duration,
    fixed,
    legend_for,
    percent,
    short,
    sparkline,
    spoken,
    thousands,
)
from klamp.config import KLConfig
from klamp.diagnostics.metrics import METRICS
from klamp.training.config import TrainConfig

CLIPPED = TrainConfig(kl=KLConfig(kl_clip_method="hard"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (-0.01234, "-0.0123"),
        (0.0, "0.0000"),
        (1.2e-7, "1e-07"),
        (123456.0, "1e+05"),
        (12.5, "12.5000"),
    ],
)
def test_fixed(value: float, text: str) -> None:
    assert fixed(4)(value) == text


def test_what_is_not_a_number_is_shown_as_such() -> None:
    assert (fixed(3)(float("nan")), fixed(3)(float("inf"))) == ("nan", "inf")


def test_other_numbers() -> None:
    assert (short(0.01), short(3e-4), short(0.0), short(12345.0)) == ("0.01", "3.0e-04", "0", "1.2e+04")
    assert (percent(0.0123), thousands(999.6), thousands(12345.0)) == ("1.2%", "1000", "12.3k")
    assert (duration(61.6), duration(3661), duration(-1)) == ("1:02", "1:01:01", "0:00")
    assert (spoken(9.96), spoken(72.4), spoken(3720)) == ("10.0 s", "1 min 12 s", "1 h 2 min")


def test_every_column_shows_a_metric_of_the_table() -> None:
    assert [column.metric for column in COLUMNS if column.metric not in METRICS] == []


def test_a_missing_metric_is_a_dash() -> None:
    column = COLUMNS[1]
    assert column.cell({}) == "-"
    assert column.cell({column.metric: 0.25}) == "0.2500"


def test_values_fit_their_columns() -> None:
    extreme = {"kl/k1": -9.9999, "beta": 1.23e-5, "train/learning_rate": 3e-4, "speed/tokens_per_second": 9_999_000.0}
    for column in COLUMNS:
        assert len(column.title) <= column.width
        assert len(column.cell(extreme | {"kl/over_budget": 1.0, "policy/ratio_clipped": 1.0})) <= column.width + 1


def test_the_share_over_budget_is_there_when_the_kl_is_clipped() -> None:
    titles = {
        True: [c.title for c in columns_for(CLIPPED, 200)],
        False: [c.title for c in columns_for(TrainConfig(), 200)],
    }
    assert "over" in titles[True]
    assert "over" not in titles[False]
    assert "KL budget" in legend_for(CLIPPED)
    assert "KL budget" not in legend_for(TrainConfig())


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_columns_fit_the_terminal_and_reward_stays_longest(width: int) -> None:
    kept = columns_for(CLIPPED, width)
    assert kept[0].title == "reward"
    assert STEP_WIDTH + sum(column.width + GAP for column in kept) <= width
    assert [c for c in COLUMNS if c in kept] == kept


def test_a_hundred_columns_hold_everything() -> None:
    assert [c.metric for c in columns_for(CLIPPED, 100)] == [c.metric for c in COLUMNS]


def test_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 1.0, 2.0, 7.0], 4) == "▁▂▃█"
    assert sparkline([1.0, 1.0], 4) == "▁▁"
    assert sparkline([], 4) == ""
    assert sparkline([float("nan"), 0.0, 1.0], 4) == "▁█"
    assert len(sparkline([float(i) for i in range(1000)], 37)) == 37


def test_scores_are_points_where_they_lie_between_0_and_1() -> None:
    points = ScoreScale.of({"a": 0.5}, {"a": 1.0})
    assert (points.write(0.9375), points.change(0.5, 0.9375), points.change(0.9, 0.5)) == ("93.8", "+43.8", "-40.0")
    raw = ScoreScale.of({"a": 0.5}, {"a": 1.5})
    assert (raw.write(1.5), raw.change(0.5, 1.5), raw.write(None), raw.change(None, 1.0)) == ("1.5", "+1", "-", "-")
