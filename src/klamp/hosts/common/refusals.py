"""Which of klamp's options a host with a loop and a loss of its own cannot honour; each with the reason."""

from __future__ import annotations

import warnings

from klamp.config import KLConfig
from klamp.errors import KLWarning, Refusal


def host_refusals(kl: KLConfig, host: str) -> list[Refusal]:
    """What no host of this kind can do."""
    return [
        Refusal(
            kl.kl_early_stop is not None,
            f"kl_early_stop cannot be honoured by {host}",
            why="its loop takes the optimizer step itself and offers no way to leave it out; a loss of 0 in its place "
            "would still move the weights by momentum and weight decay",
            fix="leave kl_early_stop unset, and lower num_iterations or the learning rate; klamp train has it",
        ),
        Refusal(
            kl.reference == "remote",
            f"reference='remote' cannot be honoured by {host}",
            why="it scores the reference with a model of its own process",
            fix="pass a model as ref_model, or use klamp train",
        ),
        Refusal(
            kl.reference_device is not None,
            f"reference_device cannot be honoured by {host}",
            why="its own preparation puts the reference on the device of the process",
            fix="leave reference_device unset; reference_dtype makes the reference smaller",
        ),
        Refusal(
            kl.reference_share < 1,
            f"reference_share={kl.reference_share:g} cannot be honoured by {host}",
            why="it scores every completion with the reference in one call, so that nothing would be saved",
            fix="leave reference_share unset; klamp train has it",
        ),
    ]


def warn_without_kl(kl: KLConfig) -> None:
    """Say so when KL fields are set and there is no KL term because beta is 0."""
    if not kl.needs_reference:
        warnings.warn(
            "KL fields are set and beta is 0 (the host's default): there is no KL term and no reference is loaded. "
            "Set beta (0.001 to 0.05 is usual), or kl_monitor=True to log the KL without a term.",
            KLWarning,
            stacklevel=4,
        )
