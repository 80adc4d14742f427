"""The claims of klamp as checks that run anywhere: values, gradients, placement, clips, anchors, controllers, types.

>>> all(check.passed for check in verify_estimators())
True
"""

from collections.abc import Mapping

from klamp.verify.proofs import anchors, gradients, values
from klamp.verify.proofs.check import Check, Proof, run_section

ESTIMATOR_PROOFS: Mapping[str, Proof] = {
    "values: tokens of the policy": values.prove_values,
    "values: Gaussians (Schulman)": values.prove_gaussians,
    "gradients, one position: klamp": gradients.prove_gradients,
    "gradients, one position: plain formulas": gradients.prove_formulas,
    "gradients over sequences: klamp": gradients.prove_sequences,
    "gradients over sequences: plain formulas": gradients.prove_sequence_formulas,
}
"""Values, gradients and sequences: what the estimators are and do."""

PROOFS: Mapping[str, Proof] = {
    **ESTIMATOR_PROOFS,
    "placement: reward and advantage": gradients.prove_placement,
    "clips and budgets": gradients.prove_clipping,
    "a teacher, and the sampler": anchors.prove_teacher,
    "a head of k tokens: noise": anchors.prove_noise,
    "a teacher: forms that claim its KL": anchors.prove_wrong_forms,
    "controllers": gradients.prove_controllers,
    "thirty nats": values.prove_numerics,
}
"""Everything that klamp claims."""


def verify_estimators() -> list[Check]:
    """Checks every claim about the estimators: values and gradients, at one position and over completions."""
    return [check for section, proof in ESTIMATOR_PROOFS.items() for check in run_section(section, proof)]


def verify_all() -> list[Check]:
    """Checks every claim that klamp makes."""
    return [check for section, proof in PROOFS.items() for check in run_section(section, proof)]


__all__ = ["ESTIMATOR_PROOFS", "PROOFS", "Check", "Proof", "verify_all", "verify_estimators"]
