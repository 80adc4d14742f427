"""What `KLConfig` and `TeacherConfig` have in common: one term, and one set of rules for the fields of both.

A field of the KL to the reference is called `kl_NAME`, one of the KL to a teacher `teacher_NAME`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from klamp.core.term import KLTerm
from klamp.errors import Refusal


def build_term(config: Any, prefix: str, **own: Any) -> KLTerm:
    """The term of the fields `prefix_NAME` of a configuration; `own`: what is named otherwise."""
    names = {field.name: f"{prefix}_{field.name}" for field in fields(KLTerm)}
    chosen = {name: getattr(config, named) for name, named in names.items() if hasattr(config, named)}
    return KLTerm(**{**chosen, "value": getattr(config, f"{prefix}_estimator"), **own})


def placement_refusals(config: Any, anchor: str) -> list[Refusal]:
    """What place, horizon and weights of a KL do not allow together."""
    names = ("estimator", "placement", "horizon", "off_policy")
    estimator, placement, horizon, off_policy = (getattr(config, f"{anchor}_{name}") for name in names)
    return [
        Refusal(
            placement != "loss" and estimator != "k1",
            f"{anchor}_placement={placement!r} takes {anchor}_estimator='k1' only, not {estimator!r}",
            why="through the score function k1 gives the gradient of the reverse KL; k3 gives the reverse minus the "
            "forward gradient, which cancels near the anchor, k2 is biased, and a KL over the vocabulary or a head "
            "does not depend on the sampled token, so that as an advantage its expected gradient is 0",
            fix=f"set {anchor}_estimator='k1' (k3 is logged all the same), or {anchor}_placement='loss'",
        ),
        Refusal(
            placement == "reward" and horizon == "token",
            f"{anchor}_placement='reward' has {anchor}_horizon='sequence'",
            why="a reward belongs to the whole completion, so its KL is the sum over the sequence",
            fix=f"set {anchor}_horizon='sequence', or {anchor}_placement='advantage' for the per-token shift",
        ),
        Refusal(
            placement != "loss" and off_policy != "none",
            f"{anchor}_off_policy has no meaning with {anchor}_placement={placement!r}",
            why="the surrogate's own importance ratio already weighs what is in the advantage",
            fix=f"set {anchor}_off_policy='none'",
        ),
        Refusal(
            horizon == "sequence" and off_policy == "token",
            f"{anchor}_horizon='sequence' needs {anchor}_off_policy='sequence' (or 'none')",
            why="the token ratio does not correct the prefix that a later token was sampled from",
            fix=f"set {anchor}_off_policy='sequence'",
        ),
    ]
