"""The rule that holds a KL: by hand, and what must hold after any measurements."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.core.controllers import BetaState, HoldController

TARGET = 0.05
KLS = st.lists(st.floats(0, 1e6), max_size=40)


def held(value: float = 0.01, **parameters: float) -> HoldController:
    return HoldController(value, target=TARGET, min_value=value / 10, max_value=13.0, **parameters)


def test_the_first_measurement_fills_the_filter_and_the_next_moves_level_and_trend_half_way() -> None:
    rule = HoldController(0.2, target=0.1, gain=0.1, lead=4.0, landing=0.0)
    one = rule.after(rule.state, 0.04)
    assert (one.level, one.trend) == (pytest.approx(0.4), 0.0)
    assert one.value == 0.2, "it is below half of the target"
    two = rule.after(one, 0.06)
    assert (two.level, two.trend) == pytest.approx((0.5, 0.05))
    three = rule.after(two, 0.19)
    level = 0.55 + 0.5 * (1.9 - 0.55)
    trend = 0.05 + 0.5 * (level - 0.5 - 0.05)
    assert (three.level, three.trend) == pytest.approx((level, trend))
    assert three.value == pytest.approx(two.value * math.exp(0.1 * min(1.0, level + 4 * trend - 1)))


def test_by_default_it_looks_twelve_steps_ahead_and_moves_by_a_twentieth_of_what_it_sees() -> None:
    rule = HoldController(0.2, target=0.1, landing=0.0)
    state = rule.after(BetaState(0.2, level=0.9, trend=0.01), 0.091)
    assert (state.level, state.trend) == pytest.approx((0.91, 0.01)), "as it was foreseen"
    assert state.value == pytest.approx(0.2 * math.exp(0.05 * (0.91 + 12 * 0.01 - 1)), rel=1e-9)


def test_it_lands_at_the_mean_of_squares_of_the_steps_near_the_reference() -> None:
    """By hand; a step that tells nothing, and one beyond half of the target, have no part in it."""
    rule = held()
    for landing, kl in ((2.0, 0.0), (None, 0.0), (4.0, 0.001), (9.0, 0.06)):
        rule.landing = landing
        rule.update(kl)
    assert rule.state.landing == pytest.approx(math.sqrt(0.8 * 2**2 + 0.2 * 4**2)) and rule.state.level > 0.5
    assert rule.value == pytest.approx(rule.state.landing) and rule.state.landed == 1


def test_told_nothing_it_lands_at_three_tenths_over_the_root_of_the_target() -> None:
    rule = HoldController(0.1, target=0.09)
    assert rule.after(BetaState(0.1, level=1.2, trend=0.0), 0.12).value == pytest.approx(1.0)


@pytest.mark.parametrize(("level", "trend", "lands"), [(0.6, 0.09, False), (0.6, 0.1, True), (1.2, 0.0, True)])
def test_it_lands_when_the_target_is_passed_or_will_be_by_far(level: float, trend: float, lands: bool) -> None:
    rule = HoldController(0.1, target=1.0, landing=9.0)
    state = BetaState(0.1, level=level - trend, trend=trend, landing=0.5)
    assert rule.after(state, level).landed == lands
    assert rule.after(state, level).value == (0.5 if lands else pytest.approx(0.1, rel=0.06))
    assert rule.after(state._replace(landing=0.09), level).landed == 0, "what raises nothing is no landing"


def test_below_half_of_the_target_beta_is_never_lowered_below_its_start_and_from_there_on_it_may_be() -> None:
    rule = HoldController(0.1, target=1.0)
    assert rule.after(BetaState(0.1, level=0.45, trend=0.0), 0.45).value == 0.1
    assert rule.after(BetaState(0.1, level=0.55, trend=0.0), 0.55).value < 0.1
    assert rule.after(BetaState(0.05, level=0.45, trend=0.0), 0.45).value == 0.05, "nor does it jump back"


def test_a_kl_that_comes_up_slowly_to_its_target_or_a_landing_of_0_never_makes_it_jump() -> None:
    for controller, rise in ((held(), 0.0002), (held(landing=0.0), 0.02)):
        betas = [controller.value, *(controller.update(min(0.055, rise * step)) for step in range(400))]
        assert all(b <= a * math.exp(0.05) * (1 + 1e-12) for a, b in pairwise(betas))


@given(kls=KLS)
def test_no_step_but_the_landing_is_larger_than_the_gain(kls: list[float]) -> None:
    controller = held()
    for kl in kls:
        before, had_landed = controller.state, controller.state.landed
        after = controller.update(kl)
        assert 0.001 <= after <= 13.0 and math.isfinite(after)
        if had_landed or not controller.state.landed:
            assert abs(math.log(after / before.value)) <= 0.05 + 1e-9


def test_a_measurement_counts_as_four_targets_at_most() -> None:
    rule = HoldController(0.2, target=0.1, landing=0.0)
    assert (rule.after(rule.state, 0.39).level, rule.after(rule.state, 1e6).level) == (pytest.approx(3.9), 4.0)


def test_many_steps_at_once_move_beta_by_e_at_most() -> None:
    rule = HoldController(0.2, target=0.1, landing=0.0)
    assert rule.update(9.0, n_steps=100) == pytest.approx(0.2 * math.e)
