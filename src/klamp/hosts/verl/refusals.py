"""The options of klamp that verl has no place for, each with the reason and the way out."""

from __future__ import annotations

from klamp.config import KLConfig
from klamp.errors import Refusal, refuse
from klamp.hosts.common.refusals import host_refusals


def check(kl: KLConfig) -> None:
    """Refuse what no hook of verl can carry.

    Raises:
        ConfigError: with the reason.
    """
    refuse(refusals(kl))


def refusals(kl: KLConfig) -> list[Refusal]:
    """What no hook of verl can carry, one row for each."""
    return [
        *host_refusals(kl, "verl"),
        Refusal(
            kl.kl_estimator == "exact",
            "kl_estimator='exact' cannot be honoured by verl",
            why="its loss is given the log-probabilities of the sampled tokens alone, and the reference's come from "
            "another process, which returns those and no logits",
            fix="use kl_estimator='k3'",
        ),
        Refusal(
            kl.kl_normalizer is not None,
            f"kl_normalizer={kl.kl_normalizer!r} cannot be honoured by verl",
            why="its loss_agg_mode averages the policy loss and the KL alike",
            fix="leave kl_normalizer unset, and set actor_rollout_ref.actor.loss_agg_mode",
        ),
        Refusal(
            kl.reference != "auto",
            f"reference={kl.reference!r} cannot be honoured by verl",
            why="it decides itself: the policy without its adapter where lora_rank is set, else a frozen copy",
            fix="leave reference unset",
        ),
        Refusal(
            kl.reference_dtype is not None,
            "reference_dtype cannot be honoured by verl",
            why="its own engine loads the reference",
            fix="leave reference_dtype unset",
        ),
    ]
