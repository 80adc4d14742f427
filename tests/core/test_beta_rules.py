"""The pure rules of beta: nothing outside them changes, and the controllers are nothing but a rule and its state."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klamp.core.beta_rules import (
    BetaState,
    DualRule,
    FixedRule,
    HoldRule,
    PIDRule,
    ProportionalRule,
    StepRule,
    adaptive_kl_coefficient,
)
from klamp.core.controllers import (
    DualController,
    FixedController,
    HoldController,
    PIDController,
    ProportionalController,
    StepController,
)
from klamp.errors import ConfigError, NonFiniteError

PAIRS = {
    "fixed": (FixedRule, FixedController, {}),
    "hold": (HoldRule, HoldController, {"target": 0.05, "gain": 0.25, "lead": 4.0, "landing": 2.0}),
    "step": (StepRule, StepController, {"target": 0.05, "up": 1.25, "down": 0.5, "high": 2.0, "low": 0.75}),
    "proportional": (ProportionalRule, ProportionalController, {"target": 0.05, "horizon": 16, "clip": 0.5}),
    "dual": (DualRule, DualController, {"target": 0.05, "lr": 0.5}),
    "pid": (PIDRule, PIDController, {"target": 0.05, "kp": 0.5, "ki": 0.25, "kd": 0.125}),
}
MEASURED = st.lists(st.tuples(st.floats(0, 1e9), st.integers(1, 16)), max_size=12)
BOUNDS = st.fixed_dictionaries({"min_value": st.floats(0, 0.1), "max_value": st.none() | st.floats(0.1, 10)})
NAMES = pytest.mark.parametrize("name", PAIRS)


@NAMES
@given(measured=MEASURED, bounds=BOUNDS)
def test_a_controller_is_its_rule_step_by_step(name, measured, bounds):
    rule_of, controller_of, parameters = PAIRS[name]
    rule, controller = rule_of(**parameters, **bounds), controller_of(0.1, **parameters, **bounds)
    assert controller.rule == rule
    state = rule.init(0.1)
    for kl, n_steps in measured:
        state = rule(state, kl, n_steps)
        assert controller.update(kl, n_steps) == state.value
    assert controller.state == state


@NAMES
@given(kl=st.floats(0, 10), start=st.floats(0, 5), integral=st.floats(0, 5), before=st.floats(-1, 5))
def test_a_rule_is_pure(name, kl, start, integral, before):
    """The same state and KL give the same state, whatever came between; neither the rule nor the state changes."""
    rule_of, _, parameters = PAIRS[name]
    rule, state = rule_of(**parameters), BetaState(start, integral, before)
    first = rule(state, kl)
    rule(rule(first, 3.0), 0.0)
    assert rule(state, kl) == first
    assert state == BetaState(start, integral, before)
    assert rule == rule_of(**parameters) and hash(rule) == hash(rule_of(**parameters))


@NAMES
def test_nothing_of_it_can_be_changed(name):
    rule_of, _, parameters = PAIRS[name]
    rule = rule_of(**parameters)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.min_value = 0.3
    with pytest.raises(AttributeError):
        rule.init(0.1).value = 0.3


def test_two_runs_of_one_rule_do_not_meet():
    """One rule may serve several states, as a controller that is shared could not."""
    rule = PIDRule(target=0.05, kp=0.5, ki=0.25, kd=0.125)
    calm = wild = rule.init(0.1)
    for _ in range(3):
        calm, wild = rule(calm, 0.05), rule(wild, 1.0)
    assert calm == BetaState(pytest.approx(0.1), pytest.approx(0.1), 0.05)
    assert wild.value > 1.0 and wild.previous_kl == 1.0


@NAMES
@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -0.1])
def test_a_kl_that_is_no_measurement_is_refused(name, kl):
    rule_of, _, parameters = PAIRS[name]
    rule = rule_of(**parameters)
    with pytest.raises(NonFiniteError, match="finite KL"):
        rule(rule.init(0.1), kl)


@pytest.mark.parametrize("name", ["hold", "step", "proportional", "dual", "pid"])
def test_where_beta_would_overflow_the_state_stays(name):
    rule_of, _, parameters = PAIRS[name]
    rule, state = rule_of(**parameters), BetaState(1.7e308, 1.7e308, 0.0)
    assert rule(state, 1.7e308, 16) == state


def test_the_start_has_to_lie_within_the_bounds():
    with pytest.raises(ConfigError, match="within its bounds"):
        StepRule(target=0.05, min_value=0.2).init(0.1)
    assert DualRule(target=0.05, lr=1.0, max_value=0.3).init(0.3) == BetaState(0.3)
    assert PIDRule(target=0.05, kp=1.0, ki=0.0, kd=0.0).init(0.3) == BetaState(0.3, 0.3, -1.0)


@pytest.mark.parametrize(("kl", "factor"), [(0.21, 3.0), (0.2, 1.0), (0.1, 1.0), (0.05, 1.0), (0.04, 0.5), (0.0, 0.5)])
def test_the_step_rule_acts_outside_its_band_alone(kl, factor):
    rule = StepRule(target=0.1, up=3.0, down=0.5, high=2.0, low=0.5)
    assert rule(rule.init(0.25), kl).value == 0.25 * factor


def test_hold_may_land_once_and_until_five_steps_after_the_target_was_reached():
    rule = HoldRule(target=0.1)
    assert [rule.may_land(BetaState(0.1, since=since)) for since in (-1.0, 0.0, 5.0, 6.0)] == [True, True, True, False]
    assert not rule.may_land(BetaState(0.1, since=1.0, landed=1.0))
    assert not StepRule(target=0.1).may_land(BetaState(0.1))


def as_printed(kl_divergence: float, target_kl: float, kl_coefficient: float) -> float:
    """The GRPO tutorial's function, word for word but for the coefficient, which it reads from outside."""
    if kl_divergence > target_kl * 1.5:
        return kl_coefficient * 1.5
    if kl_divergence < target_kl * 0.5:
        return kl_coefficient * 0.75
    return kl_coefficient


@given(st.floats(0, 10), st.floats(1e-3, 1), st.floats(0, 100))
def test_the_tutorials_rule_is_the_step_rule(kl, target, beta):
    assert adaptive_kl_coefficient(kl, target, kl_coefficient=beta) == as_printed(kl, target, beta)
    assert adaptive_kl_coefficient(kl, kl_coefficient=beta) == as_printed(kl, 0.05, beta)
    controller = StepController(beta, target=target)
    assert adaptive_kl_coefficient(kl, target, kl_coefficient=beta) == controller.update(kl)


def test_the_tutorials_rule_refuses_what_would_stay_in_beta():
    for bad in (float("nan"), -0.1):
        with pytest.raises(NonFiniteError):
            adaptive_kl_coefficient(bad, kl_coefficient=0.01)
    with pytest.raises(ConfigError):
        adaptive_kl_coefficient(0.1, kl_coefficient=-1.0)
    with pytest.raises(ConfigError):
        adaptive_kl_coefficient(0.1, 0.0, kl_coefficient=0.01)


@NAMES
def test_a_rule_takes_its_numbers_by_name(name):
    """A target and a bound are both plain numbers: by their order they would be mistaken for one another."""
    rule_of, _, _ = PAIRS[name]
    with pytest.raises(TypeError, match="positional"):
        rule_of(0.05)


def test_until_the_target_is_reached_beta_is_never_below_its_start_and_from_then_on_it_may_be():
    """The KL comes down steeply and jumps: filtered it reaches the target, and is foreseen below it."""
    rule = HoldRule(target=1.0)
    falling = rule.init(0.1)._replace(level=0.98, trend=-0.5)
    reached = rule(falling, 2.0)
    assert reached.since == 0 and reached.trend < 0
    assert reached.value < 0.1
    before = rule(falling._replace(level=0.7), 1.5)
    assert before.since < 0 and before.value == 0.1
