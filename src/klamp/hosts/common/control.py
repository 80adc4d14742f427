"""beta from one optimizer step to the next in a host's loop, and what a checkpoint must hold of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from klamp.config import KLConfig
from klamp.core.schedules import kl_schedule_factor
from klamp.errors import RunFolderError

NEVER_ZERO = sys.float_info.min
"""What a host sees in place of a beta of 0 while klamp wants the reference scored: hosts drop it at exactly 0."""


class KLControl:
    """The coefficient of a run: the controller, times its schedule; and the frozen reference length."""

    def __init__(self, kl: KLConfig) -> None:
        self.kl = kl
        self.controller = kl.build_controller()
        self.reference_length: float | None = kl.kl_reference_length
        self.last_kl: float | None = None
        self.rate_factor = 1.0

    def beta(self, step: int, total_steps: int) -> float:
        """The coefficient in force at a step (from 0) of a run of `total_steps`."""
        kl = self.kl
        factor = kl_schedule_factor(
            step, total_steps, schedule=kl.kl_schedule, warmup_steps=kl.kl_warmup_steps, end=kl.kl_schedule_end
        )
        return self.controller.value * factor

    def host_beta(self, step: int, total_steps: int) -> float:
        """The same as a host should see it: never 0 while anything asks for the reference."""
        beta = self.beta(step, total_steps)
        return max(beta, NEVER_ZERO) if self.kl.needs_reference else beta

    def update(self, kl: float) -> None:
        """Take in the KL of an optimizer step, in nats per token; a KL that is no number leaves beta as it is.

        To be called before the step is taken: `rate_factor`, what kl_lr_guard makes of its learning rate, goes by the
        KL of the step before.
        """
        guard = self.kl.kl_lr_guard
        self.rate_factor = 1.0 if guard is None or self.last_kl is None else guard / max(guard, self.last_kl)
        if math.isfinite(kl):
            self.controller.update(kl)
            self.last_kl = kl

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during a run, as JSON can hold it."""
        return {
            "controller_name": self.kl.controller_name,
            "controller": self.controller.state_dict(),
            "reference_length": self.reference_length,
            "last_kl": self.last_kl,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            RunFolderError: it was written by another controller.
            ConfigError: a number is missing.
        """
        if state["controller_name"] != self.kl.controller_name:
            raise RunFolderError(
                "the checkpoint was written with another controller of beta",
                got=f"saved {state['controller_name']!r}, configured {self.kl.controller_name!r}",
                why="its state means nothing to this one",
                fix="resume with the same kl_controller and target_kl, or start a new run",
            )
        self.controller.load_state_dict(state["controller"])
        self.reference_length, self.last_kl = state["reference_length"], state["last_kl"]
