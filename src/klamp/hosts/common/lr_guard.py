"""kl_lr_guard in a transformers loop: a smaller learning rate for the steps after a KL that was too large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class LearningRateGuard(TrainerCallback):
    """Scales the learning rate of each optimizer step, and puts it back before the scheduler looks at it.

    Args:
        factor: what the rate of the coming step is multiplied by, in (0, 1].
    """

    def __init__(self, factor: Callable[[], float]) -> None:
        self.factor = factor
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lower the rate."""
        groups, factor = kwargs["optimizer"].param_groups, self.factor()
        self.rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put it back."""
        for group, rate in zip(kwargs["optimizer"].param_groups, self.rates, strict=True):
            group["lr"] = rate
