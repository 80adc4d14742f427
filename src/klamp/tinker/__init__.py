"""The KL layer for the Tinker SDK: datums, reference log-probabilities, the loss, one forward-backward of it.

    build_datum, compute_reference_logprobs     before the step; of a teacher with a head: compute_teacher_head
    forward_backward_kl, compute_grpo_kl_loss   the step
    shift_advantages, penalize_rewards          the KL elsewhere than in the loss, for the built-in losses
    sampler_mismatch                            whether the sampler is the trainer
    check                                       whether the KL in a custom loss is right
    effective                                   what the KL of a call will really do, in words

`klamp.tinker.testing` is a stand-in server to run all of it against, offline: `pip install ./standin` in a clone.
"""

from klamp.hosts.common.effective import Effective, EffectiveTerm
from klamp.hosts.tinker.checking import check
from klamp.hosts.tinker.datums import build_datum, strip_for_builtin
from klamp.hosts.tinker.loss import compute_grpo_kl_loss, count_tokens, forward_backward_kl, sampler_mismatch
from klamp.hosts.tinker.options import LossOptions, effective
from klamp.hosts.tinker.placement import penalize_rewards, shift_advantages
from klamp.hosts.tinker.reference import compute_reference_logprobs, compute_teacher_head

__all__ = [
    "Effective",
    "EffectiveTerm",
    "LossOptions",
    "build_datum",
    "check",
    "compute_grpo_kl_loss",
    "compute_reference_logprobs",
    "compute_teacher_head",
    "count_tokens",
    "effective",
    "forward_backward_kl",
    "penalize_rewards",
    "sampler_mismatch",
    "shift_advantages",
    "strip_for_builtin",
]
