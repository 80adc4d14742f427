"""Controllers and schedules of beta: values worked out by hand, what holds after any measurements, refusals."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from klamp.core.controllers import (
    BetaState,
    FixedController,
    HoldController,
    ProportionalController,
    StepController,
    adaptive_kl_coefficient,
    kl_schedule_factor,
)
from klamp.errors import ConfigError, KlampError

MAKERS = {
    "fixed": lambda **b: FixedController(0.1, **b),
    "hold": lambda **b: HoldController(0.1, target=0.05, **b),
    "step": lambda **b: StepController(0.1, target=0.05, **b),
    "ppo": lambda **b: StepController(0.1, target=0.05, up=2.0, down=0.5, high=1.5, low=1 / 1.5, **b),
    "proportional": lambda **b: ProportionalController(0.1, target=0.05, horizon=10, **b),
}
few = settings(max_examples=25)
ADAPTIVE = [name for name in MAKERS if name != "fixed"]


def run(controller, *kls):
    return tuple(controller.update(kl) for kl in kls)


@pytest.mark.parametrize("name", MAKERS)
def test_a_kl_that_rounding_made_negative_counts_as_0(name):
    rounded, exact = MAKERS[name](), MAKERS[name]()
    assert rounded.update(-1e-7) == exact.update(0.0) and rounded.state == exact.state


def test_step_stands_still_on_the_edges_of_its_band_and_ppos_rule_halves_and_doubles_beyond_them():
    controller = StepController(0.1, target=2.0)
    assert all(kind(0.1, target=2.0) != kind(0.1, target=2.0) for kind in (StepController, HoldController))
    assert run(controller, 3.0, 1.0) == (0.1, 0.1)
    assert run(controller, math.nextafter(3.0, 4.0), math.nextafter(1.0, 0.0)) == pytest.approx(
        (0.15, 0.1125), abs=1e-9
    )
    ppo = StepController(1.0, target=0.03, up=2.0, down=0.5, high=1.5, low=1 / 1.5)
    assert run(ppo, 0.0451, 0.0449, 0.0201, 0.0199, 0.0) == pytest.approx((2.0, 2.0, 2.0, 1.0, 0.5), abs=1e-9)


def test_proportional_clips_the_relative_error_and_scales_it_by_steps_over_horizon():
    controller = ProportionalController(0.2, target=6.0, horizon=100)
    betas = [controller.update(kl, n_steps=10) for kl in (6.6, 0.0, 6.0, 1e9)]
    factors = [1 + 0.1 * 10 / 100, 1 - 0.2 * 10 / 100, 1.0, 1 + 0.2 * 10 / 100]
    assert betas == pytest.approx([0.2 * math.prod(factors[: i + 1]) for i in range(4)], abs=1e-9)
    assert controller.update(6.6) == pytest.approx(betas[-1] * (1 + 0.1 / 100), abs=1e-9), "one step by default"


@pytest.mark.parametrize("name", MAKERS)
@few
@given(kl=st.floats(0, 10), start=st.floats(0, 5), level=st.floats(-1, 5), trend=st.floats(-1, 1))
def test_a_rule_is_pure_and_update_keeps_what_it_gives(name, kl, start, level, trend):
    """The same state and KL give the same state, whatever came between; neither the rule nor the state changes."""
    controller, state = MAKERS[name](), BetaState(start, level, trend)
    known = dict(vars(controller))
    first = controller.after(state, kl, 2)
    controller.after(controller.after(first, 3.0), 0.0)
    assert controller.after(state, kl, 2) == first
    assert state == BetaState(start, level, trend) and vars(controller) == known
    controller.state = state
    assert controller.update(kl, 2) == first.value == controller.value
    assert controller.state == first


@pytest.mark.parametrize("name", ADAPTIVE)
def test_where_beta_would_overflow_the_state_stays(name):
    state = BetaState(1.7e308)
    assert MAKERS[name]().after(state, 1.7e308, 10) == state


@pytest.mark.parametrize("name", ADAPTIVE)
@few
@given(kls=st.lists(st.floats(0, 1e6), max_size=30), low=st.floats(0, 0.1), high=st.floats(0.1, 10))
def test_beta_stays_within_its_bounds_and_is_never_nan(name, kls, low, high):
    bounded, free = MAKERS[name](min_value=low, max_value=high), MAKERS[name]()
    for kl in kls:
        assert low <= bounded.update(kl) <= high
        assert 0.0 <= free.update(kl)
        assert not math.isnan(free.value)


@pytest.mark.parametrize("name", ADAPTIVE)
@few
@given(a=st.floats(0, 10), b=st.floats(0, 10))
def test_a_larger_kl_never_gives_a_smaller_beta(name, a, b):
    small, large = sorted((a, b))
    # `hold` keeps its start below half of the target, where nothing was learnt yet.
    assume(name != "hold" or (small < 0.025) == (large < 0.025))
    assert MAKERS[name]().update(small) <= MAKERS[name]().update(large)


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_controller_continues_as_if_it_had_never_stopped(name):
    kls = [0.0, 0.02, 0.06, 1.0, *[0.0] * 8, 0.2, 0.2, 0.05]  # passes the target, falls far below it, and passes again
    wanted = run(MAKERS[name](), *kls)
    for cut in range(len(kls)):
        first, second = MAKERS[name](), MAKERS[name]()
        run(first, *kls[:cut])
        second.update(0.9)
        second.load_state_dict(first.state_dict())
        assert second.value == first.value
        assert run(second, *kls[cut:]) == wanted[cut:]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -float("inf"), -1e-3, -1.0])
def test_a_kl_that_is_nan_infinite_or_negative_is_refused_and_leaves_no_trace(name, kl):
    controller = MAKERS[name]()
    controller.update(0.2)
    before = controller.state
    with pytest.raises(KlampError):
        controller.update(kl)
    assert controller.state == before


def test_more_steps_than_the_horizon_are_refused_since_the_factor_could_turn_negative():
    controller = ProportionalController(0.2, target=6.0, horizon=10, clip=1.0)
    with pytest.raises(ConfigError, match="horizon"):
        controller.update(0.0, n_steps=11)
    assert controller.value == 0.2
    assert controller.update(0.0, n_steps=10) == 0.0


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "bounds", [{"min_value": -0.1}, {"min_value": 0.2}, {"max_value": 0.05}, {"min_value": 0.3, "max_value": 0.2}]
)
def test_bounds_that_are_negative_crossed_or_exclude_the_start_are_refused(name, bounds):
    with pytest.raises(ConfigError):
        MAKERS[name](**bounds)


@pytest.mark.parametrize(
    ("rule", "choices"),
    [
        *((StepController, choices) for choices in ({"up": 0.9}, {"down": 1.1}, {"down": 0.0}, {"low": 0.0})),
        (StepController, {"high": 0.4, "low": 0.5}),
        (ProportionalController, {"horizon": 10, "clip": 1.5}),
    ],
)
def test_a_rule_that_pushes_the_wrong_way_too_far_or_not_at_all_is_refused(rule, choices):
    with pytest.raises(ConfigError):
        rule(0.1, target=0.05, **choices)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("broken", [{}, {"value": float("nan")}, {"value": float("inf")}])
def test_a_broken_saved_state_is_refused(name, broken):
    with pytest.raises(KlampError):
        MAKERS[name]().load_state_dict(broken)


def as_printed(kl_divergence: float, target_kl: float, kl_coefficient: float) -> float:
    """The GRPO tutorial's function, word for word but for the coefficient, which it reads from outside."""
    if kl_divergence > target_kl * 1.5:
        return kl_coefficient * 1.5
    if kl_divergence < target_kl * 0.5:
        return kl_coefficient * 0.75
    return kl_coefficient


@few
@given(st.floats(0, 10), st.floats(1e-3, 1), st.floats(0, 100))
def test_the_tutorials_rule_is_the_step_rule(kl, target, beta):
    assert adaptive_kl_coefficient(kl, target, kl_coefficient=beta) == as_printed(kl, target, beta)
    assert adaptive_kl_coefficient(kl, kl_coefficient=beta) == as_printed(kl, 0.05, beta)


def test_the_factor_has_its_held_values():
    def factors(schedule, *steps):
        return [kl_schedule_factor(step, 100, schedule=schedule) for step in steps]

    assert factors("constant", 0, 100) == [1.0, 1.0]
    assert factors("linear", 0, 25, 100) == pytest.approx([1.0, 0.75, 0.0], abs=1e-12)
    assert factors("cosine", 0, 25, 50, 100) == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, 0.0], abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@few
@given(step=st.integers(0, 300), total=st.integers(0, 200), warmup=st.integers(0, 300))
def test_the_factor_never_leaves_the_unit_interval(step, total, schedule, warmup):
    factor = kl_schedule_factor(step, total, schedule=schedule, warmup_steps=warmup)
    assert -1e-12 <= factor <= 1 + 1e-12


# the rule that holds a KL ---------------------------------------------------------------------------------------------


def held(value: float = 0.01, **parameters: float) -> HoldController:
    return HoldController(value, target=0.05, min_value=value / 10, max_value=13.0, **parameters)


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
    """Told nothing, it lands at three tenths over the root of the target."""
    rule = HoldController(0.2, target=0.09)
    assert rule.after(BetaState(0.2, level=1.2, trend=0.0), 0.12).value == pytest.approx(1.0)
    rule = HoldController(0.2, target=0.1, landing=0.0)
    state = rule.after(BetaState(0.2, level=0.9, trend=0.01), 0.091)
    assert (state.level, state.trend) == pytest.approx((0.91, 0.01)), "as it was foreseen"
    assert state.value == pytest.approx(0.2 * math.exp(0.05 * (0.91 + 12 * 0.01 - 1)), rel=1e-9)


def test_it_lands_at_the_mean_of_squares_of_the_steps_near_the_reference() -> None:
    rule = held()
    for landing, kl in ((2.0, 0.0), (None, 0.0), (4.0, 0.001), (9.0, 0.06)):
        rule.landing = landing
        rule.update(kl)
    assert rule.state.landing == pytest.approx(math.sqrt(0.8 * 2**2 + 0.2 * 4**2)) and rule.state.level > 0.5
    assert rule.value == pytest.approx(rule.state.landing) and rule.state.landed == 1


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


@given(kls=st.lists(st.floats(0, 1e6), max_size=40))
def test_no_step_but_the_landing_is_larger_than_the_gain(kls: list[float]) -> None:
    controller = held()
    for kl in kls:
        before, had_landed = controller.state, controller.state.landed
        after = controller.update(kl)
        assert 0.001 <= after <= 13.0 and math.isfinite(after)
        if had_landed or not controller.state.landed:
            assert abs(math.log(after / before.value)) <= 0.05 + 1e-9


def test_a_measurement_counts_as_four_targets_at_most_and_many_steps_move_beta_by_e_at_most() -> None:
    rule = HoldController(0.2, target=0.1, landing=0.0)
    assert (rule.after(rule.state, 0.39).level, rule.after(rule.state, 1e6).level) == (pytest.approx(3.9), 4.0)
    assert rule.update(9.0, n_steps=100) == pytest.approx(0.2 * math.e)
