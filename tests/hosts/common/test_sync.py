"""Which reading of the weights explains what was reported, from numbers alone."""

from __future__ import annotations

import pytest
import torch

from klamp.hosts.common.sync import COARSE, SAME, START, WEIGHTS, Reported, compare


def test_the_gap_is_the_mean_size_of_the_differences_of_finite_numbers_and_without_any_it_explains_nothing() -> None:
    reported = torch.tensor([-1.0, -2.0, float("nan"), -3.0])
    readings = {WEIGHTS: torch.tensor([-1.5, -2.0, -9.0, -2.0]), START: torch.tensor([float("nan"), -2.0, -2.0, -3.0])}
    side = compare({"sampler": reported}, readings).sides[0]
    assert side.gaps == {WEIGHTS: pytest.approx(0.5), START: 0.0}
    lost = torch.full((2,), float("nan"))
    side = compare({"sampler": torch.tensor([-1.0, -1.0])}, {WEIGHTS: torch.tensor([-5.0, -5.0]), START: lost}).sides[0]
    assert side.gaps[START] == float("inf")
    assert side.nearest == WEIGHTS


@pytest.mark.parametrize(
    ("right", "other", "nearest"),
    [
        (SAME, 0.0, WEIGHTS),  # the same, whatever else fits better
        (0.5, 0.2, WEIGHTS),  # not clearly nearer
        (0.5, 0.1, START),
        (0.01, 0.0, START),  # data types could explain it, and another reading does so exactly
    ],
)
def test_another_reading_is_named_only_where_it_is_clearly_nearer(right: float, other: float, nearest: str) -> None:
    assert Reported(side="sampler", gaps={WEIGHTS: right, START: other}).nearest == nearest


def test_what_is_right_within_data_types() -> None:
    assert Reported(side="sampler", gaps={WEIGHTS: COARSE}).is_right
    assert not Reported(side="sampler", gaps={WEIGHTS: COARSE * 1.01}).is_right
