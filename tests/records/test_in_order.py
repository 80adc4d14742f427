"""Completions a step at a time, as a record has them."""

from __future__ import annotations

import pytest
from tests.diagnostics.histories import completion

from klamp.diagnostics.statistics import row_of
from klamp.records.files import StepsOutOfOrder, by_step


def test_the_completions_of_one_step_after_another() -> None:
    rows = [completion(2), completion(2, reward=0.5), completion(5)]
    first, last = by_step(iter(rows))
    assert (first.step, first.completions, first.row) == (2, rows[:2], None)
    assert (last.step, last.completions) == (5, rows[2:])
    assert [each.row for each in by_step(rows, with_rows=True)] == [row_of(2, rows[:2]), row_of(5, rows[2:])]
    assert list(by_step([])) == []


def test_no_more_is_read_than_was_asked_for() -> None:
    def lines():
        yield completion(1)
        yield completion(2)
        raise AssertionError("read too far")

    assert next(by_step(lines())).step == 1


def test_a_step_that_comes_back_ends_the_reading() -> None:
    found = by_step([completion(1), completion(3), completion(1)])
    assert [next(found).step, next(found).step] == [1, 3]
    with pytest.raises(StepsOutOfOrder):
        next(found)
