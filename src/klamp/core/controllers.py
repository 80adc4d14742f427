"""Controllers of beta, which turn the measured KL into the next coefficient; and schedules, factors on it.

Feed a controller the exact KL or k3, in the unit of the logged metric and over the whole global batch; never a mean of
k1, which can be negative. The value stays within [min_value, max_value] and is never NaN. A rule is a pure function,
`controller.after(state, kl) -> state`; `update` keeps the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from klamp.core.arguments import (
    ABOVE_0_TO_1,
    AT_LEAST_0,
    AT_LEAST_1,
    COEFFICIENT,
    INSIDE_0_1,
    POSITIVE,
    check_fields,
    check_instance,
    check_number,
    describe,
    is_finite_number,
    limited,
)
from klamp.errors import ConfigError, NonFiniteError

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]

DIVISOR = POSITIVE.but("the rule divides by it or scales with it", "")
CLIP = ABOVE_0_TO_1.but("it bounds a relative error of the KL", "0.2 is the default")
GAIN = INSIDE_0_1.but("beta moves by at most this share of itself in a step", "0.05 is the default")
LEAD = AT_LEAST_0.but("it looks so many steps ahead", "12 is the default")

# Rounding of an exact KL in float32 can fall just below zero.
_ROUNDING = -1e-6


class BetaState(NamedTuple):
    """What a controller remembers from one measurement to the next; `HoldController` alone uses more than the value."""

    value: float
    level: float = -1.0  # the filtered KL, in targets; -1 before the first
    trend: float = 0.0  # how much the level rises in a step
    landing: float = -1.0  # where to land, by the steps so far; -1 if unknown
    landed: float = 0.0  # 1 once beta has been raised to it, which happens once


def _checked_kl(kl: float) -> float:
    if not isinstance(kl, float):
        check_number("kl", kl)
    if not is_finite_number(kl) or kl < _ROUNDING:
        raise NonFiniteError(
            "a controller needs a finite KL that is not negative",
            got=kl,
            why="a mean of k1 can go negative, and a NaN would stay in beta for good",
            fix="feed the exact KL or the mean of k3 over the whole batch",
        )
    return max(0.0, kl)


@dataclass(eq=False)
class FixedController:
    """A constant coefficient, beta_{n+1} = beta_n, from `min_value` to `max_value` (None: no bound).

    Raises:
        ConfigError: a value outside its bounds, or bounds that cross.
    """

    value: float
    """The coefficient to use now."""
    _: KW_ONLY
    min_value: float = limited(0.0, COEFFICIENT)
    max_value: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.min_value <= self.value <= self._upper:
            raise ConfigError(
                "beta must be a number within its bounds",
                got=f"value={self.value}, min_value={self.min_value}, max_value={self.max_value}",
                why="the controller holds beta between them",
                fix="start between the bounds, min_value <= max_value",
            )
        self.start = float(self.value)
        self._take(BetaState(self.start))

    def _take(self, state: BetaState) -> None:
        self.state, self.value = state, state.value

    def start_at(self, value: float) -> None:
        """Begin anew at a coefficient, bounded, that another controller came to; the rule's start is the lower one."""
        self.start = self._bounded(min(value, self.value))
        self._take(BetaState(self._bounded(value)))

    @property
    def _upper(self) -> float:
        return math.inf if self.max_value is None else self.max_value

    def _bounded(self, value: float) -> float:
        return min(max(value, self.min_value), self._upper)

    def update(self, kl: float, n_steps: int = 1) -> float:
        """Take in a measured KL (exact, or the mean of k3) of `n_steps`; return the new coefficient.

        Raises:
            NonFiniteError: a KL that is NaN, infinite or negative.
            ConfigError: n_steps < 1, or more than a proportional controller's horizon.
        """
        self._take(self.after(self.state, kl, n_steps))
        return self.value

    def after(self, state: BetaState, kl: float, n_steps: int = 1) -> BetaState:
        """The state after a measurement, see `update`; the same one where beta would overflow. Changes nothing."""
        check_number("n_steps", n_steps, AT_LEAST_1, whole=True)
        following = self._next(state, _checked_kl(kl), n_steps)
        bounded = following._replace(value=self._bounded(following.value))
        return bounded if math.isfinite(bounded.value) else state

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        return state

    _saved: ClassVar[tuple[str, ...]] = ("value",)

    def state_dict(self) -> dict[str, float]:
        """Everything that changes during a run, as plain numbers."""
        return {name: getattr(self.state, name) for name in self._saved}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state.

        Raises:
            ConfigError: a state with a missing or non-finite number.
        """
        check_instance("state", state, Mapping, fix="pass what state_dict returned")
        missing = [name for name in self._saved if not is_finite_number(state.get(name))]
        if missing:
            raise ConfigError(
                "the controller's saved state does not fit",
                got=describe(dict(state)),
                why=f"missing or not finite: {', '.join(missing)}",
                fix="resume with the same kl_controller that wrote it",
            )
        saved = BetaState(**{name: state[name] for name in self._saved})
        self._take(saved._replace(value=self._bounded(saved.value)))


@dataclass(eq=False, kw_only=True)
class HoldController(FixedController):
    """Holds the KL at its target: acts in the log domain, on a filtered KL some steps ahead, and slowly.

    The KL lags the weights by some ten steps and jitters by some 15 %. Level and trend of kl / target are filtered by
    Holt's exponential smoothing, and beta follows where they lead. Equation, with the error clipped to [-1, 1]::

        error = level + lead * trend - 1        log beta_{n+1} = log beta_n + gain * error

    Below half of the target beta is not lowered further than to its start: so small a KL says that nothing was learnt
    yet. The completions of those steps are about the reference's, so that they tell where the target will be held: the
    beta of each (`landing`) enters a mean of squares over some nine steps. When the KL comes up past the target, or so
    fast that it will (foreseen above 1.75 targets, or above 1.15 already), beta is raised to that mean, once. Any other
    step is at most a factor exp(gain), which leaves Adam's second moment as it was. Beta itself is the memory, within
    its bounds, so that nothing winds up while the KL does not answer. Measured: docs/controllers.md.

    Args:
        value, target: starting coefficient; the KL to hold, in the unit of the KL that `update` gets.
        gain: largest change of log beta in a step, in (0, 1).
        lead: steps ahead that it looks, about the lag of the KL behind the weights.
        landing: the beta that a step puts the target at; None: unknown. Without any it lands at 0.3 / sqrt(target), for
            advantages of variance 1 and some five tokens. At 0 it never jumps.

    Raises:
        ConfigError: parameters out of range.

    Source: proportional-derivative control in the log domain, in velocity form; Holt's linear smoothing
    """

    target: float = limited(MISSING, DIVISOR)
    gain: float = limited(0.05, GAIN)
    lead: float = limited(12.0, LEAD)
    landing: float | None = limited(None, COEFFICIENT)

    _saved = ("value", "level", "trend", "landing", "landed")

    def _next(self, state: BetaState, kl: float, n_steps: int) -> BetaState:
        level, trend = _filtered(state, min(kl / self.target, _CEILING), n_steps)
        foreseen = level + self.lead * trend
        factor = math.exp(min(self.gain * n_steps, 1.0) * min(max(foreseen - 1, -1.0), 1.0))
        value = max(state.value * factor, min(state.value, self.start) if level < _NEAR else 0.0)
        early = not state.landed and (level < _NEAR or state.landing < 0)
        landing = self._pooled(state.landing) if early else state.landing
        highest = 0.3 / math.sqrt(self.target) if landing < 0 else landing
        if not state.landed and highest > value and (foreseen > _FORESEEN or level > _ABOVE):
            return BetaState(highest, level=level, trend=trend, landing=landing, landed=1.0)
        return state._replace(value=value, level=level, trend=trend, landing=landing)

    def land_as(self, landing: float, target: float) -> None:
        """Land where another target was landed at, scaled to this one: to second order a KL falls as 1 / beta^2."""
        if landing > 0:
            self._take(self.state._replace(landing=landing * math.sqrt(target / self.target)))

    def _pooled(self, landing: float) -> float:
        """Where to land, updated by this step: squares are averaged, like variances of rewards."""
        if self.landing is None or landing < 0:
            return landing if self.landing is None else self.landing
        return math.hypot(math.sqrt(1 - _POOLED) * landing, math.sqrt(_POOLED) * self.landing)


# Weights of a new measurement in the filtered KL and in its trend: an average over the last few steps.
_LEVEL, _TREND = 0.5, 0.5
# A measurement counts as at most so many targets, so that a wild step does not fill the filter.
_CEILING = 4.0
# Targets below which completions are about the reference's; foreseen, and filtered, from which on beta lands.
_NEAR, _FORESEEN, _ABOVE = 0.5, 1.75, 1.15
# Weight of a new step in where to land.
_POOLED = 0.2


def _filtered(state: BetaState, kl: float, n_steps: int) -> tuple[float, float]:
    """Level and trend of the KL by Holt's exponential smoothing."""
    if state.level < 0:
        return kl, 0.0
    foreseen = state.level + n_steps * state.trend
    level = max(0.0, foreseen + (1 - (1 - _LEVEL) ** n_steps) * (kl - foreseen))
    rise = (level - state.level) / n_steps
    return level, state.trend + (1 - (1 - _TREND) ** n_steps) * (rise - state.trend)


@dataclass(eq=False, kw_only=True)
class StepController(FixedController):
    """Multiplies beta when the KL leaves a band around the target.

    Equation: beta * up if kl > high * target; beta * down if kl < low * target; else beta.
    PPO's rule is up=2, down=0.5, high=1.5, low=1/1.5. It winds up while the KL lags (docs/controllers.md);
    `HoldController` holds a target.

    Args:
        value, target: starting coefficient; the KL to hold, in the unit of the KL that `update` gets.
        up, down: factors, up >= 1 >= down > 0.
        high, low: edges of the band, as multiples of the target.

    Raises:
        ConfigError: parameters out of range.

    Source: the GRPO tutorial (defaults; docs/sources.md); PPO arXiv:1707.06347
    """

    target: float = limited(MISSING, DIVISOR)
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
    """The next coefficient by the rule of the GRPO tutorial: `StepController` at its defaults, for a loop of one's own.

    Equation: 1.5 kl_coefficient if kl > 1.5 target; 0.75 kl_coefficient if kl < 0.5 target; else kl_coefficient.

    In a run the rule is `kl_controller="step"`. It holds no target (docs/controllers.md); `kl_controller="hold"` does.

    Args:
        kl_divergence: exact KL or mean k3, in the unit of the target; never a mean of k1, which can be negative.
        target_kl: the KL to hold.
        kl_coefficient: the coefficient in force, >= 0; the tutorial reads it from outside of the function.

    Raises:
        NonFiniteError: a KL that is NaN, infinite or negative.
        ConfigError: a coefficient or a target out of range.

    Source: the GRPO tutorial (docs/sources.md)
    """
    return StepController(kl_coefficient, target=target_kl).update(kl_divergence)


@dataclass(eq=False, kw_only=True)
class ProportionalController(FixedController):
    """Ziegler's rule: beta grows or shrinks in proportion to the clipped relative error.

    Equation: beta * (1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon). Slow at a horizon of 100
    (docs/controllers.md).

    Args:
        value, target: starting coefficient; the KL to hold.
        horizon: steps over which a saturated error multiplies beta by 1 + clip.
        clip: bound of the relative error, in (0, 1].

    Raises:
        ConfigError: parameters out of range; in `update`, n_steps > horizon (the factor could turn negative).

    Source: arXiv:1909.08593
    """

    target: float = limited(MISSING, DIVISOR)
    horizon: int = limited(MISSING, DIVISOR)
    clip: float = limited(0.2, CLIP)

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


def kl_schedule_factor(step: int, total_steps: int, *, schedule: Schedule = "constant", warmup_steps: int = 0) -> float:
    """The factor on beta at a step (from 0) of so many, in [0, 1].

    Equation (w = warmup_steps, x = (step - w) / (total_steps - w))::

        step < w    step / w
        constant    1
        linear      1 - x
        cosine      (1 + cos(pi x)) / 2
    """
    if step < warmup_steps:
        return step / warmup_steps
    x = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "linear":
        return 1 - x
    return 1.0 if schedule == "constant" else (1 + math.cos(math.pi * x)) / 2
