"""Controllers of beta: each turns the KL that was measured into the next coefficient.

`rule(state, kl) -> state` is a pure function; the classes hold its parameters and the state. Feed them the exact KL or
k3, in the unit of the logged metric and over the whole global batch; never a mean of k1, which can be negative. The
value stays within [min_value, max_value], is never negative and never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from klamp.errors import ConfigError, NonFiniteError

# Rounding of an exact KL in float32 can fall just below zero.
_ROUNDING = -1e-6


def _positive(name: str, x: float) -> float:
    if not (x > 0 and math.isfinite(x)):
        raise ConfigError(
            f"{name} must be a positive number",
            got=x,
            why="the rule divides by it or scales with it",
            fix=f"leave {name} at its default, or set it above 0",
        )
    return x


def _checked_kl(kl: float) -> float:
    if not math.isfinite(kl) or kl < _ROUNDING:
        raise NonFiniteError(
            "a controller needs a finite KL that is not negative",
            got=kl,
            why="a mean of k1 can go negative, and a NaN would stay in beta for good",
            fix="feed the exact KL or the mean of k3 over the whole batch",
        )
    return max(0.0, kl)


class FixedController:
    """A constant coefficient.

    Equation: beta_{n+1} = beta_n.

    Args:
        value: the coefficient, >= 0.
        min_value: lower bound of the coefficient.
        max_value: upper bound of the coefficient; None for none.

    Raises:
        ConfigError: a value outside its bounds, or bounds that cross.
    """

    def __init__(self, value: float, *, min_value: float = 0.0, max_value: float | None = None) -> None:
        upper = math.inf if max_value is None else max_value
        if not 0.0 <= min_value <= upper:
            raise ConfigError(
                "the bounds of beta must satisfy 0 <= min_value <= max_value",
                got=f"min_value={min_value}, max_value={max_value}",
                why="a negative coefficient rewards leaving the reference",
                fix="use min_value=0.0",
            )
        if not (math.isfinite(value) and min_value <= value <= upper):
            raise ConfigError(
                "beta must be a number within its bounds",
                got=f"value={value}, min_value={min_value}, max_value={max_value}",
                why="a negative coefficient rewards leaving the reference",
                fix="start between the bounds",
            )
        self.min_value, self.max_value, self._value = min_value, max_value, float(value)

    @property
    def value(self) -> float:
        """The coefficient to use now."""
        return self._value

    def _bounded(self, value: float) -> float:
        return min(max(value, self.min_value), math.inf if self.max_value is None else self.max_value)

    def _rule(self, kl: float, n_steps: int) -> float:
        return self._value

    def update(self, kl: float, n_steps: int = 1) -> float:
        """Take in a measured KL and return the new coefficient.

        Args:
            kl: exact KL or mean k3, in the unit of the target.
            n_steps: how many steps (of the horizon's unit) this measurement stands for.

        Raises:
            NonFiniteError: a KL that is NaN, infinite or negative.
            ConfigError: n_steps < 1, or more than a proportional controller's horizon.
        """
        if n_steps < 1:
            raise ConfigError("n_steps must be at least 1", got=n_steps)
        value = self._bounded(self._rule(_checked_kl(kl), n_steps))
        if math.isfinite(value):
            self._value = value
        return self._value

    def state_dict(self) -> dict[str, float]:
        """Everything that changes during a run, as plain numbers."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state.

        Raises:
            ConfigError: a state with a missing or non-finite number.
        """
        missing = [key for key in self.state_dict() if not math.isfinite(state.get(key, math.nan))]
        if missing:
            raise ConfigError(
                "the controller's saved state does not fit",
                got=dict(state),
                why=f"missing or not finite: {', '.join(missing)}",
                fix="resume with the same kl_controller that wrote it",
            )
        self._load(state)

    def _load(self, state: Mapping[str, float]) -> None:
        self._value = self._bounded(state["value"])


class _TargetController(FixedController):
    def __init__(self, value: float, *, target: float, min_value: float, max_value: float | None) -> None:
        super().__init__(value, min_value=min_value, max_value=max_value)
        self.target = _positive("target", target)


class StepController(_TargetController):
    """Multiplies beta when the KL leaves a band around the target.

    Equation: beta * up if kl > high * target; beta * down if kl < low * target; else beta.
    PPO's rule is up=2, down=0.5, high=1.5, low=1/1.5.

    Args:
        value: starting coefficient.
        target: the KL to hold, in the unit of the KL that `update` gets.
        up, down: factors, up >= 1 >= down > 0.
        high, low: edges of the band, as multiples of the target.
        min_value, max_value: bounds of the coefficient. From 0 a multiplicative rule never leaves.

    Raises:
        ConfigError: parameters out of range.

    Source: source document 003 (defaults); PPO arXiv:1707.06347
    """

    def __init__(
        self,
        value: float,
        *,
        target: float,
        up: float = 1.5,
        down: float = 0.75,
        high: float = 1.5,
        low: float = 0.5,
        min_value: float = 0.0,
        max_value: float | None = None,
    ) -> None:
        super().__init__(value, target=target, min_value=min_value, max_value=max_value)
        if not (up >= 1 >= down > 0 and high >= low > 0):
            raise ConfigError(
                "the step rule needs up >= 1 >= down > 0 and high >= low > 0",
                got=f"up={up}, down={down}, high={high}, low={low}",
                why="otherwise it would push the KL away from its target",
            )
        self.up, self.down, self.high, self.low = up, down, high, low

    def _rule(self, kl: float, n_steps: int) -> float:
        if kl > self.high * self.target:
            return self._value * self.up
        return self._value * self.down if kl < self.low * self.target else self._value


class ProportionalController(_TargetController):
    """Ziegler's rule: beta grows or shrinks in proportion to the clipped relative error.

    Equation: beta * (1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon).

    Args:
        value: starting coefficient.
        target: the KL to hold.
        horizon: steps over which a saturated error multiplies beta by 1 + clip.
        clip: bound of the relative error, in (0, 1].
        min_value, max_value: bounds of the coefficient.

    Raises:
        ConfigError: parameters out of range; in `update`, n_steps > horizon (the factor could turn negative).

    Source: arXiv:1909.08593
    """

    def __init__(
        self,
        value: float,
        *,
        target: float,
        horizon: int,
        clip: float = 0.2,
        min_value: float = 0.0,
        max_value: float | None = None,
    ) -> None:
        super().__init__(value, target=target, min_value=min_value, max_value=max_value)
        self.horizon = _positive("horizon", horizon)
        if not 0 < clip <= 1:
            raise ConfigError("clip must lie in (0, 1]", got=clip, why="it bounds a relative change of beta")
        self.clip = clip

    def _rule(self, kl: float, n_steps: int) -> float:
        if n_steps > self.horizon:
            raise ConfigError(
                "n_steps is larger than the horizon",
                got=f"n_steps={n_steps}, horizon={self.horizon}",
                why="the factor 1 + error * n_steps / horizon can then turn negative",
                fix="raise kl_controller_horizon, or update more often",
            )
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        return self._value * (1 + error * n_steps / self.horizon)


class DualController(_TargetController):
    """Dual ascent on the constraint kl <= target: beta is its Lagrange multiplier.

    Equation: max(0, beta + lr * (kl - target)) per step.

    Args:
        value: starting coefficient.
        target: the KL allowed.
        lr: step size, in beta per nat.
        min_value, max_value: bounds of the coefficient.

    Raises:
        ConfigError: parameters out of range.

    Source: constrained policy optimisation by Lagrangian duality, see arXiv:2007.03964
    """

    def __init__(
        self, value: float, *, target: float, lr: float, min_value: float = 0.0, max_value: float | None = None
    ) -> None:
        super().__init__(value, target=target, min_value=min_value, max_value=max_value)
        self.lr = _positive("lr", lr)

    def _rule(self, kl: float, n_steps: int) -> float:
        return self._value + self.lr * n_steps * (kl - self.target)


class PIDController(_TargetController):
    """PID control of the constraint: proportional and derivative terms damp the swings of dual ascent.

    Equation (e = kl - target; I = integral, kept within what the bounds can use; D only when the KL rises)::

        I_n = max(0, I_{n-1} + ki * e_n)        beta_n = kp * e_n + I_n + kd * max(0, kl_n - kl_{n-1})

    `value` is the starting integral, so that beta starts there and stays there while the KL is on target.

    Args:
        value: starting coefficient.
        target: the KL to hold.
        kp, ki, kd: gains in beta per nat, >= 0 and not all 0.
        min_value, max_value: bounds of the coefficient.

    Raises:
        ConfigError: parameters out of range.

    Source: arXiv:2007.03964
    """

    def __init__(
        self,
        value: float,
        *,
        target: float,
        kp: float,
        ki: float,
        kd: float,
        min_value: float = 0.0,
        max_value: float | None = None,
    ) -> None:
        super().__init__(value, target=target, min_value=min_value, max_value=max_value)
        gains = (kp, ki, kd)
        if not (all(math.isfinite(g) and g >= 0 for g in gains) and any(gains)):
            raise ConfigError(
                "the PID gains must be >= 0 and not all 0",
                got=f"kp={kp}, ki={ki}, kd={kd}",
                why="a negative gain pushes the KL away from its target",
            )
        self.kp, self.ki, self.kd = gains
        self._integral = float(value)
        self._previous_kl = -1.0

    def _rule(self, kl: float, n_steps: int) -> float:
        error = kl - self.target
        rise = max(0.0, kl - self._previous_kl) if self._previous_kl >= 0 else 0.0
        self._integral = self._bounded(max(0.0, self._integral + self.ki * n_steps * error))
        self._previous_kl = kl
        return self.kp * error + self._integral + self.kd * rise

    def state_dict(self) -> dict[str, float]:
        """Value, integral and the previous KL (-1 before the first)."""
        return {"value": self._value, "integral": self._integral, "previous_kl": self._previous_kl}

    def _load(self, state: Mapping[str, float]) -> None:
        super()._load(state)
        self._integral, self._previous_kl = state["integral"], state["previous_kl"]


Controller = FixedController
