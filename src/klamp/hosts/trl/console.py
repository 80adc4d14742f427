"""What TRL's console prints of a step: of klamp's many KLs those that one looks at. The records keep all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from klamp.diagnostics.metrics import METRICS

SHOWN = ("kl/k1", "kl/k3", "kl/exact", "kl/k3_sequence", "kl/over_budget")
"""The KL per token by each estimator, that of a whole completion, and how often it is past its budget."""
BOUNDS = ("kl/log_ratio_clamped", "kl/k3_saturated", "kl/host_clamped", "kl/weights_truncated")
"""Shares of tokens at which a bound binds: shown where one does."""
GUARD = "kl/lr_factor"
"""Shown where it lowers the learning rate."""


def shown(logs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A logged row as the console prints it; whatever is no KL of klamp's stays.

    Args:
        logs: name -> value, the names of an evaluation with `eval_` in front; None: nothing was logged.
    """
    return None if logs is None else {name: value for name, value in logs.items() if _is_shown(name, value)}


def _is_shown(name: str, value: Any) -> bool:
    bare = name.removeprefix("eval_")
    if not bare.startswith("kl/") or bare not in METRICS or bare in SHOWN:
        return True
    return (bare in BOUNDS and value != 0) or (bare == GUARD and value != 1)


class ShortPrinter(PrinterCallback):
    """transformers' printer of logs, without the KLs that nobody reads there."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a logged row."""
        super().on_log(args, state, control, logs=shown(logs), **kwargs)


class ShortProgress(ProgressCallback):
    """transformers' progress bar, without the KLs that nobody reads there."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a logged row above the bar."""
        super().on_log(args, state, control, logs=shown(logs), **kwargs)


SHORT: Mapping[type, type] = {PrinterCallback: ShortPrinter, ProgressCallback: ShortProgress}


def shorten(trainer: Any) -> None:
    """Let the console of a trainer print the KLs that one looks at; a printer of the user's own is left as it is."""
    for callback in trainer.callback_handler.callbacks:
        callback.__class__ = SHORT.get(type(callback), type(callback))
