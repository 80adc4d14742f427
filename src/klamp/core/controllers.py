"""Controllers of beta: each turns the KL that was measured into the next coefficient.

The rules are pure functions (`klamp.core.beta_rules`: state in, state out); a controller is a rule and the state that
it is in. Feed it the exact KL or k3, in the unit of the logged metric and over the whole global batch; never a mean of
k1, which can be negative. The value stays within [min_value, max_value], is never negative and never NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

from klamp.core.arguments import check_instance, describe, is_finite_number
from klamp.core.beta_rules import (
    BetaState,
    DualRule,
    FixedRule,
    HoldRule,
    PIDRule,
    ProportionalRule,
    StepRule,
)
from klamp.errors import ConfigError


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

    rule: FixedRule
    """The rule, with its parameters."""
    state: BetaState
    """The numbers that change during a run."""
    _saved: tuple[str, ...] = ("value",)

    def __init__(self, value: float, *, min_value: float = 0.0, max_value: float | None = None) -> None:
        self._start(FixedRule(min_value=min_value, max_value=max_value), value)

    def _start(self, rule: FixedRule, value: float) -> None:
        self.rule, self.state = rule, rule.init(value)

    @property
    def value(self) -> float:
        """The coefficient to use now."""
        return self.state.value

    def update(self, kl: float, n_steps: int = 1) -> float:
        """Take in a measured KL and return the new coefficient.

        Args:
            kl: exact KL or mean k3, in the unit of the target.
            n_steps: how many steps (of the horizon's unit) this measurement stands for.

        Raises:
            NonFiniteError: a KL that is NaN, infinite or negative.
            ConfigError: n_steps < 1, or more than a proportional controller's horizon.
        """
        self.state = self.rule(self.state, kl, n_steps)
        return self.value

    @property
    def may_land(self) -> bool:
        """Whether the coming update may land; see `land_at`."""
        return self.rule.may_land(self.state)

    def land_at(self, beta: float | None) -> None:
        """Say where to land in the coming update, which the rewards of that step decide; only `HoldController` lands.

        Args:
            beta: the coefficient; None: the default.

        Raises:
            ConfigError: a coefficient that is no number >= 0.
        """
        self.rule = self.rule.landing_at(beta)

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
        found = BetaState(**{name: state[name] for name in self._saved})
        self.state = found._replace(value=self.rule.bounded(found.value))


class HoldController(FixedController):
    """Holds the KL at its target: acts in the log domain, on a filtered KL some steps ahead, and slowly.

    The KL lags the weights by some ten steps and jitters by some 15 %, so that what is measured now is neither where
    the KL is going nor what the last beta did. Level and trend of kl / target are filtered by Holt's exponential
    smoothing, and beta follows where they lead. Equation, with the error clipped to [-1, 1]::

        error = level + lead * trend - 1        log beta_{n+1} = log beta_n + gain * error

    Before the target was first reached beta is never below its start: a KL of 0 says that nothing was learnt yet, not
    that there is room. When the KL first comes up fast (foreseen above 1.75 targets), beta lands: it jumps to
    `landing`, once, since from a small start the slow rule would come too late. Its memory is beta itself, which stays
    within the bounds, so that nothing winds up while the KL does not answer. Any other step of beta is at most a
    factor exp(gain), which leaves Adam's second moment as it was. Measured: docs/controllers.md.

    Args:
        value: starting coefficient.
        target: the KL to hold, in the unit of the KL that `update` gets.
        gain: largest change of log beta in a step, in (0, 1).
        lead: steps ahead that it looks, about the lag of the KL behind the weights.
        landing: the beta to land at; None: 0.3 / sqrt(target), for advantages of variance 1 and some five tokens; a
            trainer says what its rewards and lengths ask for. At 0 it never jumps.
        min_value, max_value: bounds of the coefficient. From 0 a multiplicative rule never leaves.

    Raises:
        ConfigError: parameters out of range.

    Source: proportional-derivative control in the log domain, in velocity form; Holt's linear smoothing
    """

    _saved = ("value", "level", "trend", "start", "since", "landed")

    def __init__(
        self,
        value: float,
        *,
        target: float,
        gain: float = 0.05,
        lead: float = 12.0,
        landing: float | None = None,
        min_value: float = 0.0,
        max_value: float | None = None,
    ) -> None:
        rule = HoldRule(target=target, gain=gain, lead=lead, landing=landing, min_value=min_value, max_value=max_value)
        self._start(rule, value)


class StepController(FixedController):
    """Multiplies beta when the KL leaves a band around the target.

    Equation: beta * up if kl > high * target; beta * down if kl < low * target; else beta.
    PPO's rule is up=2, down=0.5, high=1.5, low=1/1.5.

    It lowers beta while nothing was learnt yet and winds up while the KL lags: towards 0.05 it took beta from 8e-4 to
    547 and the reward from .88 to .60 (docs/controllers.md). `HoldController` holds a target.

    Args:
        value: starting coefficient.
        target: the KL to hold, in the unit of the KL that `update` gets.
        up, down: factors, up >= 1 >= down > 0.
        high, low: edges of the band, as multiples of the target.
        min_value, max_value: bounds of the coefficient. From 0 a multiplicative rule never leaves.

    Raises:
        ConfigError: parameters out of range.

    Source: the GRPO tutorial (defaults; docs/sources.md); PPO arXiv:1707.06347
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
        rule = StepRule(target=target, up=up, down=down, high=high, low=low, min_value=min_value, max_value=max_value)
        self._start(rule, value)


class ProportionalController(FixedController):
    """Ziegler's rule: beta grows or shrinks in proportion to the clipped relative error.

    Equation: beta * (1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon).

    Slow at a horizon of 100: towards 0.05 the KL stayed above 0.11 for 90 steps (docs/controllers.md).

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
        rule = ProportionalRule(target=target, horizon=horizon, clip=clip, min_value=min_value, max_value=max_value)
        self._start(rule, value)


class DualController(FixedController):
    """Dual ascent on the constraint kl <= target: beta is its Lagrange multiplier.

    Equation: max(0, beta + lr * (kl - target)) per step.

    Its unit is beta per nat, whatever beta is needed: with lr .01 the KL stayed above 0.11 for 90 steps towards 0.05.

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
        self._start(DualRule(target=target, lr=lr, min_value=min_value, max_value=max_value), value)


class PIDController(FixedController):
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

    _saved = ("value", "integral", "previous_kl")

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
        self._start(PIDRule(target=target, kp=kp, ki=ki, kd=kd, min_value=min_value, max_value=max_value), value)


Controller = FixedController
