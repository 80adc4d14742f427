"""Where the arms of a sweep stand in its picture."""

from __future__ import annotations

import pytest

from klamp.ablation.sweep_axis import places


def test_beta_zero_stands_apart_on_a_logarithmic_axis() -> None:
    found = places({f"beta={b}": {"beta": b} for b in (0.1, 0.0, 0.001, 0.01)})
    at = {arm: place for arm, (_, place) in found.of.items()}
    assert found.over_beta
    assert found.lines == ("",)
    assert [at[f"beta={b}"] for b in (0.001, 0.01, 0.1)] == pytest.approx([-3, -2, -1])
    assert at["beta=0.0"] == pytest.approx(-4)
    assert found.gap == pytest.approx(-3.5)
    assert found.ticks == {-4: "0", -3: "0.001", -2: "0.01", -1: "0.1"}


def test_other_fields_become_lines_over_beta_and_too_many_of_them_a_list() -> None:
    two = places({f"{b} {e}": {"beta": b, "kl_estimator": e} for e in ("k2", "k3") for b in (0.0, 0.1)})
    assert two.over_beta
    assert two.lines == ("kl_estimator=k2", "kl_estimator=k3")
    assert two.of["0.1 k3"] == ("kl_estimator=k3", -1)
    many = places({f"{b} {i}": {"beta": b, "kl_clip_threshold": i} for i in range(7) for b in (0.0, 0.1)})
    assert not many.over_beta
    assert len(many.ticks) == 14
    assert not places({"a": {"beta": 0.1}, "b": {"beta": 0.1, "kl_estimator": "k1"}}).over_beta, "one beta is no axis"
    assert not places({"a": {"beta": 0.1}, "b": {}}).over_beta, "an arm without a beta has no place on it"
