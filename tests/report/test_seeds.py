"""Seeds of one configuration as a mean with a band."""

from __future__ import annotations

import math

from klamp.report.seeds import Column, Series, columns_of, mean, spread


def series(label: str, group: str, points: dict[float, float], run: int = 0) -> Series:
    return Series(label=label, points=points, group=group, runs=(run,))


def test_a_mean_stands_before_its_runs() -> None:
    a, b = series("a0", "a", {1: 0.0, 2: 2.0}), series("a1", "a", {1: 1.0, 2: 4.0}, run=2)
    alone = series("b0", "b", {1: 9.0}, run=1)
    found = columns_of([a, alone, b])
    assert [column.series.label for column in found] == ["a, mean of 2", "a0", "a1", "b0"]
    assert [(column.members, column.of) for column in found] == [((2, 3), None), ((), 1), ((), 1), ((), None)]
    assert found[0].series.points == {1: 0.5, 2: 3.0} and found[0].series.runs == (0, 2)
    assert spread(found, found[0]) == {1: (0.0, 1.0), 2: (2.0, 4.0)}
    assert spread(found, found[3]) == {}


def test_a_mean_is_of_all_its_runs_or_none() -> None:
    long, short = series("a", "g", {1: 1.0, 2: 1.0, 3: 1.0}), series("b", "g", {1: 3.0, 2: math.nan})
    assert mean([long, short]) == {1: 2.0}, "it does not jump where one run ends"
    apart = [series("a", "g", {1: 1.0}), series("b", "g", {2: 1.0})]
    assert columns_of(apart) == [Column(series=each) for each in apart]


def test_the_largest_numbers_have_a_mean() -> None:
    assert mean([series("a", "g", {1: 1e308}), series("b", "g", {1: 1.7e308})]) == {1: 1e100}


def test_runs_without_a_group_stay_alone() -> None:
    assert [column.of for column in columns_of([series("a", "", {1: 1.0}), series("b", "", {1: 1.0})])] == [None, None]
