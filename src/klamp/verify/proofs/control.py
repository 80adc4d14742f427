"""Checks of the controllers: each rule by its numbers."""

from __future__ import annotations

import math

from klamp.core.controllers import DualController, PIDController, ProportionalController, StepController
from klamp.errors import ConfigError, NonFiniteError
from klamp.verify.proofs.check import Check, is_equal, is_true


def prove_controllers() -> list[Check]:
    """Checks what each controller does to beta (step, PPO's, Ziegler's, dual ascent, PID) and refuses."""
    step = [StepController(0.01, target=0.05).update(kl) for kl in (0.08, 0.05, 0.02)]
    ppo = [StepController(1.0, target=0.1, up=2, down=0.5, high=1.5, low=1 / 1.5).update(kl) for kl in (0.2, 0.06)]
    ziegler = ProportionalController(0.2, target=6.0, horizon=10_000)
    dual = [DualController(0.1, target=0.05, lr=1.0).update(kl) for kl in (0.15, 0.0)]
    dual_floor = DualController(0.1, target=5.0, lr=1.0).update(0.0)
    pid = PIDController(0.1, target=0.05, kp=0.5, ki=0.1, kd=0.2)
    return [
        is_equal("step: KL above 1.5 targets", step[0], 0.01 * 1.5),
        is_equal("step: KL on target", step[1], 0.01),
        is_equal("step: KL below half a target", step[2], 0.01 * 0.75),
        is_equal("PPO's rule: doubles above 1.5 targets", ppo[0], 2.0),
        is_equal("PPO's rule: halves below a target / 1.5", ppo[1], 0.5),
        is_equal("proportional: x (1 + 0.2 n / horizon), saturated", ziegler.update(60.0, 256), 0.2 * 1.00512),
        is_equal("dual: + lr (KL - target)", dual[0], 0.2),
        is_equal("dual: - lr (target - KL)", dual[1], 0.05),
        is_equal("dual: never below 0", dual_floor, 0.0),
        is_equal("PID: kp e + I, with I + ki e", pid.update(0.15), 0.5 * 0.1 + 0.1 + 0.1 * 0.1),
        _refuses("proportional: more steps than the horizon", lambda: ziegler.update(6.0, 20_000)),
        _refuses("a KL of NaN", lambda: ziegler.update(math.nan)),
        _refuses("a negative KL (a mean of k1)", lambda: ziegler.update(-0.1)),
    ]


def _refuses(claim: str, act: object) -> Check:
    try:
        result = act()  # pyright: ignore
    except (ConfigError, NonFiniteError) as error:
        return is_true(f"{claim} is refused", True, error.what, expected="refused")
    return is_true(f"{claim} is refused", False, f"accepted: {result}", expected="refused")
