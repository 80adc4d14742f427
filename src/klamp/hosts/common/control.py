"""Updates beta between optimizer steps, in every trainer, and saves its state in the checkpoint."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from klamp.config import KLConfig
from klamp.config.kl import wide_clip
from klamp.config.loss import Price, price_at_distance
from klamp.core.arguments import AT_LEAST_1, check_instance, check_number, describe, is_finite_number
from klamp.core.controllers import FixedController, HoldController, kl_schedule_factor
from klamp.core.types import Direction
from klamp.doctor.alarms_kl import FEW_PROMPTS, REFERENCE_DIFFERS
from klamp.errors import ConfigError, KLWarning, NonFiniteError, RunFolderError
from klamp.names import best_kl

OWN = ("reference_length", "last_kl")
"""What a saved state holds besides the controller's: numbers, or None."""

NEVER_ZERO = sys.float_info.min
"""What a host sees in place of a beta of 0 while klamp wants the reference scored: hosts drop it at exactly 0."""


def held_kl(metrics: Mapping[str, float], *, exact_everywhere: bool) -> float | None:
    """The KL of a step, nats per token: the exact one if every completion has it, else k3; None: no token has it."""
    return metrics.get(best_kl(metrics, ("kl/exact", "kl/k3") if exact_everywhere else ("kl/k3",)))


def check_kl(kl: float) -> None:
    """Stop a run, before its optimizer step, if the measured KL (nats per token) is NaN or infinite."""
    if not math.isfinite(kl):
        raise NonFiniteError(
            "the KL of this step is not finite",
            got=f"{kl} nats per token, before the optimizer step was taken",
            why="a NaN is also in the loss and would reach the weights; an infinite KL means a token that the policy "
            "cannot have sampled. beta can follow neither",
            fix="continue from the newest checkpoint; look at kl/log_ratio_max and the sampler against the trainer in "
            "the steps before, compare weights, tokens, mask and data types of sampler, policy and reference, or lower "
            "the learning rate",
        )


def beta_metrics(price: Price, spread: float | None) -> dict[str, float]:
    """beta in force, and the reward that it takes for one nat of a completion, at this mean deviation of a group."""
    if price.beta < 0 or (price.scaled and spread is None):  # below 0 it is no price
        return {"beta": price.beta}
    return {"beta": price.beta, "beta/price": price.at(spread or 0.0)}


def mean_spread(rewards: Tensor) -> float | None:
    """The mean standard deviation of the rewards in each row [n, G] that is not saturated; None: all rows are."""
    spreads = rewards.std(-1)
    spreads = spreads[spreads > 0]
    return float(spreads.mean()) if spreads.numel() else None


def landing_beta(
    target_kl: float, metrics: Mapping[str, float], rewards: Tensor | None, direction: Direction = "reverse"
) -> float | None:
    """The beta at which the optimum is `target_kl` nats per token from the reference, by this step's rewards [n, G].

    Its price moves the best policy that far, see `price_at_distance`; `direction`: of the KL whose gradient is taken.
    None: unknown; 0.0: the rewards differ too little for so large a KL.
    """
    price, length = metrics.get("beta/price", 0.0), metrics.get("length/mean", 0.0)
    if rewards is None or not (price > 0 and length > 0):
        return None
    return price_at_distance(rewards, length * target_kl, direction=direction) * (metrics["beta"] / price)


def warn_few_prompts(kl: KLConfig, prompts: float) -> None:
    """Warn of a target that is to be held with few prompts in a step."""
    if kl.controller_name != "fixed" and prompts < FEW_PROMPTS:
        text = (
            f"target_kl={kl.target_kl:g} may be missed with {prompts:g} prompts per step: the KL of so few is mostly "
        )
        text += f"noise, and beta follows it (docs/controllers.md). Take {FEW_PROMPTS} or more, or a fixed beta."
        warnings.warn(text, KLWarning, stacklevel=4)


RESUMED = 10.0
"""How many times larger or smaller the first KL after a resume must be to suggest another reference."""


def resumed_text(before: float, after: float) -> str:
    """The warning where the KL (nats per token) is another after a resume than in the step before; "" where not."""
    least = REFERENCE_DIFFERS.value  # a run's first steps multiply a KL below it
    if before <= max(least, RESUMED * after) and after <= RESUMED * max(least, before):
        return ""
    return (
        f"The KL is {after:.3g} nats per token in the first step after the resume, and was {before:.3g} in the last "
        "one before it. Most likely the reference is another model, or the policy is not the "
        "checkpoint's. Resume with the model and the reference that started the run."
    )


class KLControl:
    """The coefficient of a run: the controller, times its schedule; the frozen reference length."""

    def __init__(self, kl: KLConfig) -> None:
        self.kl = kl
        self.controller = kl.build_controller()
        # the controller as it was configured, which a resume compares
        self.asked: Mapping[str, Any] = {"name": kl.controller_name, **asdict(self.controller)}
        # in tokens, where the data gives none; None: not measured yet
        self.reference_length: float | None = kl.kl_reference_length
        self.last_kl: float | None = None  # the newest KL
        self.kl_before: float | None = None  # KL of the checkpoint's last step, until the first step after the resume

    def beta(self, step: int, total_steps: int) -> float:
        """The coefficient in force at a step, from 0."""
        kl = self.kl
        factor = kl_schedule_factor(step, total_steps, schedule=kl.kl_schedule, warmup_steps=kl.kl_warmup_steps)
        return math.copysign(self.controller.value * factor, kl.beta)

    def update(self, kl: float, metrics: Mapping[str, float] | None = None, rewards: Tensor | None = None) -> None:
        """Take in the KL of an optimizer step, in nats per token; for `metrics` and `rewards` see `landing_beta`."""
        check_kl(kl)
        before, self.kl_before = self.kl_before, None
        if before is not None and self.kl.reference != "periodic" and (text := resumed_text(before, kl)):
            warnings.warn(text, KLWarning, stacklevel=2)
        if isinstance(rule := self.controller, HoldController) and not rule.state.landed:
            c = self.kl
            forward = c.kl_gradient == "forward" or (c.kl_estimator, c.kl_gradient) == ("k3", "own")
            rule.landing = landing_beta(rule.target, metrics or {}, rewards, "forward" if forward else "reverse")
        self.controller.update(kl)
        self.last_kl = kl

    def reference_lengths(self, column: Sequence[float | None]) -> list[float | None]:
        """The reference length of each row in tokens: the user's number, else the data's, else the measured one."""
        if self.kl.kl_reference_length is not None:
            return [self.kl.kl_reference_length] * len(column)
        for length in column:
            check_number(
                "a reference_length in the data", length, AT_LEAST_1, optional=True, fix="leave the column out"
            )
        return [self.reference_length if length is None else length for length in column]

    def take_length(self, length: float) -> None:
        """Keep the reference length that was measured, in tokens; warn where it is short for a soft clip."""
        self.reference_length = length
        if text := wide_clip(self.kl, length):
            warnings.warn(f"The reference length is {length:.4g} tokens. {text}", KLWarning, stacklevel=2)

    def metrics(self, price: Price, spread: float | None) -> dict[str, float]:
        """What there is to log: see `beta_metrics`; the target; the reference length where a clip may need one."""
        metrics = beta_metrics(price, spread)
        if self.kl.controller_name != "fixed" and self.kl.target_kl is not None:
            metrics["kl/target"] = self.kl.target_kl
        if self.kl.kl_clip_method != "none" and self.reference_length is not None:
            metrics["kl/reference_length"] = self.reference_length
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run, as JSON can hold it."""
        return {
            "controller_name": self.kl.controller_name,
            "controller": self.controller.state_dict(),
            "asked": self.asked,
            "reference_length": self.reference_length,
            "last_kl": self.last_kl,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, with the present configuration.

        A fixed beta is the configured one. Another controller goes on where it was, if rule, beta and target are as
        they were; else it begins anew: at the configured beta if that has changed, else at the beta in force. It lands
        where the first rollouts put the former target, scaled to the present one.
        """
        _check_state(state)
        asked, saved, rule = state["asked"], FixedController(0.0), self.controller
        saved.load_state_dict(state["controller"])
        differs = {name for name in ("name", "value", "target") if asked.get(name) != self.asked.get(name)}
        if self.kl.controller_name != "fixed" and not differs:
            rule.load_state_dict(state["controller"])
        elif self.kl.controller_name != "fixed" and "value" not in differs:
            rule.start_at(saved.value)
        landing, target = state["controller"].get("landing"), asked.get("target")
        if isinstance(rule, HoldController) and differs and is_finite_number(landing) and is_finite_number(target):
            rule.land_as(landing, target)
        self.reference_length = self.kl.kl_reference_length or state["reference_length"]
        self.last_kl = self.kl_before = state["last_kl"]
        if self.last_kl is not None and not self.kl.needs_reference:
            text = f"The run had a KL of {self.last_kl:.3g} nats per token in its last step, and goes on without one"
            warnings.warn(f"{text}: beta is 0. kl_monitor=True shows where it goes.", KLWarning, stacklevel=2)


def _check_state(state: Mapping[str, Any]) -> None:
    check_instance("state", state, Mapping, fix="pass what state_dict returned")
    missing = [name for name in ("controller_name", "controller", "asked", *OWN) if name not in state]
    wrong = [name for name in OWN if not (state.get(name) is None or is_finite_number(state[name]))]
    asked, length = state.get("asked"), state.get("reference_length")
    wrong += [] if isinstance(asked, Mapping) and is_finite_number(asked.get("value")) else ["asked"]
    if not wrong and length is not None and length <= 0:
        wrong.append("reference_length")
    if missing or wrong:
        why, fix = f"missing, or no number: {', '.join(missing or wrong)}", "continue from another checkpoint"
        raise ConfigError("the saved state of beta does not fit", got=describe(dict(state)), why=why, fix=fix)


def read_state(file: Path) -> Mapping[str, Any]:
    """What klamp left in a host's checkpoint, to be given to `KLControl.load_state_dict`."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        got, why = str(file), f"{type(error).__name__}: {error}"
        fix = "continue from another checkpoint"
        raise RunFolderError("klamp's state in the checkpoint cannot be read", got=got, why=why, fix=fix) from error


def go_on_from(schedule: LambdaLR, steps: int, rate: float) -> None:
    """Have a schedule whose saved state is loaded go on by its own plan, at the peak rate that is asked for now."""
    schedule.last_epoch = steps
    schedule.base_lrs[:] = [rate] * len(schedule.base_lrs)
    schedule._last_lr = [rate * plan(steps) for plan in schedule.lr_lambdas]
    for group, now in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"], group["initial_lr"] = now, rate
