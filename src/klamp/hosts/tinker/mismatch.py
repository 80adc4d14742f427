"""Measures how far the sampler is from the trainer: the same tokens, scored by both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from klamp.core.estimators import ESTIMATORS
from klamp.core.gradients import masked_log_ratio
from klamp.core.masking import masked_mean
from klamp.hosts.tinker.padded import Rows, read_rows


def sampler_mismatch(data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> dict[str, float]:
    """KL of the sampler from the trainer in nats per token, as the two report themselves.

    Before a rollout's first update both are the same weights and only their kernels differ: about .002 is healthy,
    above .01 is an alarm. One token that differs a lot shows in k3 and the maximum, not in k1.

    Equation: with d = log sampler - log trainer: `sampler/k1` mean d, `sampler/k3` mean (exp(-d) - 1 + d),
    `sampler/log_ratio_max` max |d|, over the tokens that are trained on.

    Sampler: whoever the datums' `logprobs` belong to.
    Gradient: none.

    Args:
        data: datums.
        logprobs_list: the trainer's log-probabilities, as `forward_backward_custom` hands them to a loss.

    Raises:
        DataError, ShapeError, NonFiniteError, EmptyMaskError: as `compute_grpo_kl_loss`.
    """
    rows = read_rows(data)
    return mismatch_metrics(rows, rows.policy(logprobs_list))


@torch.no_grad()
def mismatch_metrics(rows: Rows, policy: Tensor) -> dict[str, float]:
    """`sampler_mismatch` for datums that were read before."""
    delta = masked_log_ratio(rows.logprobs, policy, rows.mask)
    found = {f"sampler/{name}": float(masked_mean(ESTIMATORS[name].value(delta), rows.mask)) for name in ("k1", "k3")}
    return found | {"sampler/log_ratio_max": float(delta.abs().max())}
