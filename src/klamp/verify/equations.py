"""Writes the KL of a configuration as equations, one line per part."""

from __future__ import annotations

from collections.abc import Mapping

from klamp.config import KLConfig, LossConfig
from klamp.config.describe import describe_average
from klamp.config.loss import kl_reduction
from klamp.core.estimators import ESTIMATORS

EXACT = "sum_v policy_v (log policy_v - log ref_v)"

COEFFICIENTS: Mapping[tuple[str, str], str] = {
    ("token", "reverse"): "{w}delta_t",
    ("token", "forward"): "{w}(1 - ref_t/policy_t)",
    ("sequence", "reverse"): "{w}delta_t + sum over later j of {wj}{value}_j",
    ("sequence", "forward"): "{w}1 - product over j <= t of ref_j/{by}_j",
}
OWN: Mapping[str, str] = {
    "k1": "{w}1",
    "k2": "{w}delta_t",
    "k3": "{w}(1 - ref_t/policy_t)",
    "abs": "{w}sign(delta_t)",
}
WEIGHTS: Mapping[str, str] = {"none": "", "token": "w_t ", "sequence": "rho_t "}
WHERE: Mapping[str, str] = {
    "none": "",
    "token": ", w_t = policy_t/sampler_t",
    "sequence": ", rho_t = product of policy/sampler up to t",
}


def equations(kl: KLConfig, loss: LossConfig) -> list[str]:
    """The equations of a configuration's KL: what is added where, and its gradient; delta = log policy - log ref."""
    gates = [] if kl.kl_clip_method == "none" else [_gate(kl)]
    if kl.kl_placement == "reward" and gates:
        formed = "advantage = A[reward] - beta * A[sum_t delta_t], A: how advantages are formed of rewards"
        return [formed, f"beta multiplied by {gates[0]}"]
    if kl.kl_placement == "reward":
        return ["reward = reward - beta * sum_t delta_t, before the advantages are formed"]
    if kl.kl_placement == "advantage":
        shift = "sum over j >= t of delta_j" if kl.kl_horizon == "sequence" else "delta_t"
        moved = f"advantage_t = advantage_t - beta * {shift}, after the advantages are formed"
        return [moved, *(f"beta multiplied by {gate}" for gate in gates)]
    return [
        f"loss = policy loss + beta * R[penalty], R: {describe_average(kl_reduction(kl, loss))}",
        f"penalty_t = {_value(kl)}",
        f"gradient of penalty_t = {_gradient(kl)}",
        *(f"gradient multiplied by {gate}" for gate in gates),
    ]


def _value(kl: KLConfig) -> str:
    if kl.kl_estimator == "exact":
        return EXACT
    formula = ESTIMATORS[kl.kl_estimator].formula.replace("delta", "delta_t")
    if kl.kl_off_policy == "none":
        return formula
    return f"{WEIGHTS[kl.kl_off_policy]}({formula}){WHERE[kl.kl_off_policy]}"


def _gradient(kl: KLConfig) -> str:
    weight = WEIGHTS[kl.kl_off_policy]
    if kl.kl_estimator == "exact" and kl.kl_gradient != "none":
        which = "sum_v ref_v (log ref_v - log policy_v)" if kl.kl_gradient == "forward" else EXACT
        later = ", and sum over later j of exact_j times grad log policy_t" if kl.kl_horizon == "sequence" else ""
        return f"grad {which}{later}"
    if kl.kl_gradient == "none":
        return "0"
    if kl.kl_gradient == "own":
        coefficient = OWN[kl.kl_estimator].format(w=weight)
    else:
        coefficient = COEFFICIENTS[kl.kl_horizon, kl.kl_gradient].format(
            w=weight,
            wj="rho_j " if weight else "",
            value="k3" if kl.kl_estimator == "k3" else "delta",
            by="sampler" if weight else "policy",
        )
    bare = " " not in coefficient or (coefficient.startswith("(") and coefficient.endswith(")"))
    return f"{coefficient if bare else f'({coefficient})'} grad log policy_t"


def _gate(kl: KLConfig) -> str:
    if kl.kl_clip_method == "hard":
        return "1 where the completion's KL is above the budget, 0 below"
    return f"sigmoid((KL of the completion - budget) / {kl.kl_clip_temperature:g})"
