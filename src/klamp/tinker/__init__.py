"""The KL layer for the Tinker SDK: datums, reference log-probabilities, the loss, one forward-backward pass.

    build_datum, compute_reference_logprobs     before the step; of a teacher with a head: compute_teacher_head
    forward_backward_kl, compute_grpo_kl_loss   the step
    check                                       whether the KL in a custom loss is right
    effective                                   what the KL of a call will really do, in words

`klamp.tinker.testing` is a stand-in server to run all of it against, offline: `pip install ./standin` in a clone.
"""

from klamp.hosts.common.effective import Effective, EffectiveTerm
from klamp.hosts.tinker.datums import build_datum, strip_for_builtin
from klamp.hosts.tinker.loss import check, compute_grpo_kl_loss, count_tokens, effective, forward_backward_kl
from klamp.hosts.tinker.reference import compute_reference_logprobs, compute_teacher_head

__all__ = [
    "Effective",
    "EffectiveTerm",
    "build_datum",
    "check",
    "compute_grpo_kl_loss",
    "compute_reference_logprobs",
    "compute_teacher_head",
    "count_tokens",
    "effective",
    "forward_backward_kl",
    "strip_for_builtin",
]
