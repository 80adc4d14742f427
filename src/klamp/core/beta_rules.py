"""The rules of the controllers of beta, without state: (what is remembered, a measured KL) -> what is remembered next.

Each rule is a frozen set of parameters and a pure function, `rule(state, kl, n_steps) -> state`, that starts from
`rule.init(value)`. `klamp.core.controllers` has the twins that keep the state; what each rule does is said there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from klamp.core.arguments import (
    ABOVE_0_TO_1,
    AT_LEAST_0,
    AT_LEAST_1,
    INSIDE_0_1,
    POSITIVE,
    check_fields,
    check_is_number,
    check_number,
    is_finite_number,
)
from klamp.errors import ConfigError, NonFiniteError

_DIVIDES = POSITIVE.but("the rule divides by it or scales with it", "")
_GAIN = AT_LEAST_0.but("a negative gain pushes the KL away from its target", "")
NUMBERS = {
    "min_value": AT_LEAST_0.but("a negative coefficient rewards leaving the reference", "use min_value=0.0"),
    "target": _DIVIDES,
    "horizon": _DIVIDES,
    "lr": _DIVIDES,
    "clip": ABOVE_0_TO_1.but("it bounds a relative change of beta", "0.2 is the default"),
    "kp": _GAIN,
    "ki": _GAIN,
    "kd": _GAIN,
    "gain": INSIDE_0_1.but("beta moves by at most this share of itself in a step", "0.05 is the default"),
    "lead": _GAIN.but("it looks so many steps ahead", "12 is the default"),
    "landing": AT_LEAST_0.but("a negative coefficient rewards leaving the reference", ""),
}
"""Which numbers the parameters of the rules take."""

# Rounding of an exact KL in float32 can fall just below zero.
_ROUNDING = -1e-6


class BetaState(NamedTuple):
    """What a rule remembers from one measurement to the next.

    Attributes:
        value: the coefficient in force.
        integral: the summed error, in units of the coefficient; `PIDRule` only.
        previous_kl: the KL before; -1 before the first; `PIDRule` only.
        level: the filtered KL, in targets; -1 before the first; `HoldRule` only, as all that follow.
        trend: how much the level rises in a step.
        start: the coefficient that the run started from.
        since: steps since the level first reached the target; -1 before.
        landed: 1 once beta has been raised to where it lands, which happens once; 0 before.
    """

    value: float
    integral: float = 0.0
    previous_kl: float = -1.0
    level: float = -1.0
    trend: float = 0.0
    start: float = 0.0
    since: float = -1.0
    landed: float = 0.0


def _checked_kl(kl: float) -> float:
    check_is_number("kl", kl)
    if not is_finite_number(kl) or kl < _ROUNDING:
        raise NonFiniteError(
            "a controller needs a finite KL that is not negative",
            got=kl,
            why="a mean of k1 can go negative, and a NaN would stay in beta for good",
            fix="feed the exact KL or the mean of k3 over the whole batch",
        )
    return max(0.0, kl)


@dataclass(frozen=True, kw_only=True)
class FixedRule:
    """beta stays as it is; also what all rules share: the bounds of beta, and the checks.

    Raises:
        ConfigError: parameters out of range.
    """

    min_value: float = 0.0
    max_value: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, NUMBERS)
        if not self.min_value <= self._upper:
            raise ConfigError(
                "the bounds of beta must satisfy 0 <= min_value <= max_value",
                got=f"min_value={self.min_value}, max_value={self.max_value}",
                why="a negative coefficient rewards leaving the reference",
                fix="use min_value=0.0",
            )

    @property
    def _upper(self) -> float:
        return math.inf if self.max_value is None else self.max_value

    def bounded(self, value: float) -> float:
        """The nearest coefficient within the bounds."""
        return min(max(value, self.min_value), self._upper)

    def may_land(self, state: BetaState) -> bool:
        """Whether the coming update may land, so that where to is worth finding out."""
        return False

    def landing_at(self, beta: float | None) -> FixedRule:
        """The rule that lands at this coefficient; the same rule, where it never lands.

        Args:
            beta: the coefficient; None: the rule's default.
        """
        return self

    def init(self, value: float) -> BetaState:
        """The state before the first measurement.

        Raises:
            ConfigError: a coefficient outside the bounds, or none.
        """
        check_number("value", value)
        if not self.min_value <= value <= self._upper:
            raise ConfigError(
                "beta must be a number within its bounds",
                got=f"value={value}, min_value={self.min_value}, max_value={self.max_value}",
                why="a negative coefficient rewards leaving the reference",
                fix="start between the bounds",
            )
        return BetaState(float(value))

    def __call__(self, state: BetaState, kl: float, n_steps: int = 1) -> BetaState:
        """The state after a measurement; the same one where beta would overflow.

        Args:
            state: the state before it; unchanged.
            kl: exact KL or mean k3, in the unit of the target.
            n_steps: how many steps (of the horizon's unit) the measurement stands for.

        Raises:
            NonFiniteError: a KL that is NaN, infinite or negative.
            ConfigError: n_steps < 1, or more than a proportional rule's horizon.
        """
        check_number("n_steps", n_steps, AT_LEAST_1, whole=True)
        found = self._next(state, _checked_kl(kl), n_steps)
        bounded = found._replace(value=self.bounded(found.value))
        return bounded if math.isfinite(bounded.value) else state

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        """The state after a KL that was checked, before the bounds of beta."""
        return state


@dataclass(frozen=True, kw_only=True)
class _TargetRule(FixedRule):
    target: float


@dataclass(frozen=True, kw_only=True)
class HoldRule(_TargetRule):
    """log beta moves in proportion to the relative error of the KL some steps ahead; see `HoldController`."""

    gain: float = 0.05
    lead: float = 12.0
    landing: float | None = None

    @property
    def landing_value(self) -> float:
        """Up to where beta is raised at once when the KL first comes up fast; see `landing_of` for the default."""
        return landing_of(self.target) if self.landing is None else self.landing

    def may_land(self, state: BetaState) -> bool:
        """Until it landed once, or the target was reached some steps ago."""
        return not state.landed and state.since <= _LANDING_STEPS

    def landing_at(self, beta: float | None) -> HoldRule:
        """The same rule with another coefficient to land at; None: the default."""
        return replace(self, landing=beta)

    def init(self, value: float) -> BetaState:
        """The state before the first measurement: nothing filtered, the target not reached."""
        return super().init(value)._replace(start=float(value))

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        level, trend = _filtered(state, min(kl / self.target, _CEILING), n_steps)
        error = min(max(level + self.lead * trend - 1, -1.0), 1.0)
        since = _since(state, level, n_steps)
        floor = state.start if since < 0 else 0.0
        value, landed = max(floor, state.value * math.exp(min(self.gain * n_steps, 1.0) * error)), state.landed
        if not landed and since <= _LANDING_STEPS and error > _ALARM:
            value, landed = max(value, self.landing_value), 1.0
        return state._replace(value=value, level=level, trend=trend, since=since, landed=landed)


def landing_of(target: float) -> float:
    """A beta that holds a KL at about `target` (nats per token): 0.3 / sqrt(target).

    The optimum of reward less beta * KL lies, for small steps, at KL = variance of the advantages / (2 beta^2) for a
    completion. Advantages of variance 1 and a completion of some five tokens give that beta, and longer completions or
    smaller rewards a lower one, to which the rule comes down by itself.
    """
    return 0.3 / math.sqrt(target)


# Weights of a new measurement in the filtered KL and in its trend: an average over the last few steps.
_LEVEL, _TREND = 0.5, 0.5
# A measurement counts as at most so many targets, so that a wild step does not fill the filter.
_CEILING = 4.0
# Beta lands until so many steps after the KL first reached its target, once it is foreseen above 1 + alarm targets.
_LANDING_STEPS, _ALARM = 5, 0.75


def _filtered(state: BetaState, kl: float, n_steps: int) -> tuple[float, float]:
    """Level and trend of the KL by Holt's exponential smoothing."""
    if state.level < 0:
        return kl, 0.0
    foreseen = state.level + n_steps * state.trend
    level = max(0.0, foreseen + (1 - (1 - _LEVEL) ** n_steps) * (kl - foreseen))
    rise = (level - state.level) / n_steps
    return level, state.trend + (1 - (1 - _TREND) ** n_steps) * (rise - state.trend)


def _since(state: BetaState, level: float, n_steps: int) -> float:
    """Steps since the level first reached the target; -1 before."""
    if state.since < 0:
        return 0.0 if level >= 1 else -1.0
    return state.since + n_steps


@dataclass(frozen=True, kw_only=True)
class StepRule(_TargetRule):
    """beta times a factor outside a band around the target; see `StepController`."""

    up: float = 1.5
    down: float = 0.75
    high: float = 1.5
    low: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.up >= 1 >= self.down > 0 and self.high >= self.low > 0):
            raise ConfigError(
                "the step rule needs up >= 1 >= down > 0 and high >= low > 0",
                got=f"up={self.up}, down={self.down}, high={self.high}, low={self.low}",
                why="otherwise it would push the KL away from its target",
                fix="1.5, 0.75, 1.5 and 0.5 are the defaults",
            )

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        if kl > self.high * self.target:
            return BetaState(state.value * self.up)
        return BetaState(state.value * self.down) if kl < self.low * self.target else state


def adaptive_kl_coefficient(kl_divergence: float, target_kl: float = 0.05, *, kl_coefficient: float) -> float:
    """The next coefficient by the rule of the GRPO tutorial: `StepRule` with its defaults, for a loop of one's own.

    Equation: 1.5 kl_coefficient if kl > 1.5 target; 0.75 kl_coefficient if kl < 0.5 target; else kl_coefficient.

    In a run the rule is `kl_controller="step"`. Before anything is learnt it takes a quarter off at every step, and
    while the KL lags it goes on raising: it holds no target (docs/controllers.md); `kl_controller="hold"` does.

    Args:
        kl_divergence: exact KL or mean k3, in the unit of the target; never a mean of k1, which can be negative.
        target_kl: the KL to hold.
        kl_coefficient: the coefficient in force, >= 0; the tutorial reads it from outside of the function.

    Raises:
        NonFiniteError: a KL that is NaN, infinite or negative.
        ConfigError: a coefficient or a target out of range.

    Source: the GRPO tutorial (docs/sources.md)
    """
    rule = StepRule(target=target_kl)
    return rule(rule.init(kl_coefficient), kl_divergence).value


@dataclass(frozen=True, kw_only=True)
class ProportionalRule(_TargetRule):
    """beta changed in proportion to the clipped relative error; see `ProportionalController`."""

    horizon: int
    clip: float = 0.2

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        if n_steps > self.horizon:
            raise ConfigError(
                "n_steps is larger than the horizon",
                got=f"n_steps={n_steps}, horizon={self.horizon}",
                why="the factor 1 + error * n_steps / horizon can then turn negative",
                fix="raise kl_controller_horizon, or update more often",
            )
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        return BetaState(state.value * (1 + error * n_steps / self.horizon))


@dataclass(frozen=True, kw_only=True)
class DualRule(_TargetRule):
    """beta plus a share of the error; see `DualController`."""

    lr: float

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        return BetaState(state.value + self.lr * n_steps * (kl - self.target))


@dataclass(frozen=True, kw_only=True)
class PIDRule(_TargetRule):
    """beta from the error, its sum and the rise of the KL; see `PIDController`."""

    kp: float
    ki: float
    kd: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any((self.kp, self.ki, self.kd)):
            raise ConfigError(
                "the PID gains are all 0",
                got=f"kp={self.kp}, ki={self.ki}, kd={self.kd}",
                why="beta would be 0 from the first update on",
                fix="0.1, 0.01 and 0.1 are the defaults of KLConfig",
            )

    def init(self, value: float) -> BetaState:
        """The state before the first measurement: the integral is beta, so that beta stays there on target."""
        return super().init(value)._replace(integral=float(value))

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        error = kl - self.target
        rise = max(0.0, kl - state.previous_kl) if state.previous_kl >= 0 else 0.0
        integral = self.bounded(max(0.0, state.integral + self.ki * n_steps * error))
        return BetaState(self.kp * error + integral + self.kd * rise, integral, kl)
