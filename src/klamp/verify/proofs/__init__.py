"""The claims of klamp as checks that run anywhere: values, gradients, placement, clips, anchors, controllers, types.

>>> all(check.passed for check in verify_estimators())
True
"""

from collections.abc import Mapping

from klamp.verify.proofs.anchors import prove_noise, prove_teacher, prove_wrong_forms
from klamp.verify.proofs.check import Check, Proof, run_section
from klamp.verify.proofs.gradients import (
    prove_clipping,
    prove_controllers,
    prove_formulas,
    prove_gradients,
    prove_placement,
    prove_sequence_formulas,
    prove_sequences,
)
from klamp.verify.proofs.values import prove_gaussians, prove_numerics, prove_values

ESTIMATOR_PROOFS: Mapping[str, Proof] = {
    "values: tokens of the policy": prove_values,
    "values: Gaussians (Schulman)": prove_gaussians,
    "gradients, one position: klamp": prove_gradients,
    "gradients, one position: plain formulas": prove_formulas,
    "gradients over sequences: klamp": prove_sequences,
    "gradients over sequences: plain formulas": prove_sequence_formulas,
}
"""Values, gradients and sequences: what the estimators are and do."""

PROOFS: Mapping[str, Proof] = {
    **ESTIMATOR_PROOFS,
    "placement: reward and advantage": prove_placement,
    "clips and budgets": prove_clipping,
    "a teacher, and the sampler": prove_teacher,
    "a head of k tokens: noise": prove_noise,
    "a teacher: forms that claim the same": prove_wrong_forms,
    "controllers": prove_controllers,
    "thirty nats": prove_numerics,
}
"""Everything that klamp claims."""


def verify_estimators() -> list[Check]:
    """Checks every claim about the estimators: values and gradients, at one position and over completions."""
    return [check for section, proof in ESTIMATOR_PROOFS.items() for check in run_section(section, proof)]


def verify_all() -> list[Check]:
    """Checks every claim that klamp makes."""
    return [check for section, proof in PROOFS.items() for check in run_section(section, proof)]


__all__ = ["ESTIMATOR_PROOFS", "PROOFS", "Check", "Proof", "verify_all", "verify_estimators"]
