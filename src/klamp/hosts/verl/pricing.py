"""What a coefficient costs in a run of verl: how its configuration forms advantages, and averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from klamp.config.loss import Price, price_of
from klamp.core.advantages import Baseline, Scale
from klamp.core.term import Placement
from klamp.hosts.verl import names

BASELINES: Mapping[str, Baseline] = {"grpo": "mean", "rloo": "leave_one_out"}
"""verl's advantages whose baseline is known here; GRPO's holds the completion's own reward."""


def price(config: Any, beta: float, placement: Placement) -> Price | str:
    """The price of a coefficient, or why it is not known.

    verl averages the policy loss of `vanilla` and the KL by the same loss_agg_mode.

    Args:
        config: verl's whole configuration.
        beta: the coefficient.
        placement: where the KL enters.
    """
    estimator, size = config["algorithm"]["adv_estimator"], int(config["actor_rollout_ref"]["rollout"]["n"])
    mode = _loss_mode(config["actor_rollout_ref"]["actor"])
    if estimator not in BASELINES:
        return f"adv_estimator={estimator} is not one of {', '.join(BASELINES)}"
    if size < 2:
        return f"rollout.n={size} leaves no group"
    if placement == "loss" and mode != "vanilla":
        return f"loss_mode={mode} may average over tokens otherwise than the KL"
    scale: Scale = "std" if divides_by_std(config["algorithm"]) else "none"
    return price_of(beta, placement=placement, baseline=BASELINES[estimator], scale=scale, group_size=size)


def _loss_mode(actor: Any) -> str:
    """The policy loss that verl computes, also where klamp's name stands before it."""
    mode = str((actor.get("policy_loss") or {}).get("loss_mode", "vanilla"))
    return (mode.partition(":")[2] or "vanilla") if names.is_ours(mode) else mode


def divides_by_std(algorithm: Any) -> bool:
    """Whether advantages are divided by the standard deviation of their group's rewards."""
    return algorithm["adv_estimator"] == "grpo" and bool(algorithm.get("norm_adv_by_std_in_grpo", True))
