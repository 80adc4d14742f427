"""Lines of verl's file logger become rows like any other."""

from __future__ import annotations

import math

from klamp.diagnostics.names import flat, is_verl_line


def test_a_line_is_known_by_its_step_and_its_data():
    assert is_verl_line({"step": 1, "data": {}})
    assert not is_verl_line({"step": 1, "reward": 0.5})
    assert not is_verl_line({"data": {}})
    assert flat({"step": 1, "reward": 0.5}) == {"step": 1, "reward": 0.5}


def test_parts_are_joined_and_null_is_a_nan():
    row = flat({"step": 3, "data": {"reward": 0.5, "val": {"a": 1, "b": 2}, "actor/grad_norm": None}})
    assert math.isnan(row.pop("actor/grad_norm"))
    assert row == {"step": 3, "reward": 0.5, "val/a": 1, "val/b": 2}
