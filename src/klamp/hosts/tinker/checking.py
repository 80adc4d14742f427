"""`klamp.check` inside a custom loss of Tinker's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from klamp.audit.micro_batch import check as check_loss
from klamp.audit.verdict import Verdict
from klamp.hosts.tinker.datums import read_rows


def check(
    loss: Tensor,
    data: Sequence[Any],
    logprobs_list: Sequence[Tensor],
    *,
    beta: float | None = None,
    means: Literal["reverse", "forward"] = "reverse",
    **more: Any,
) -> Verdict:
    """Is the KL in this loss right? Call it in a loss of `forward_backward_custom`, before the return.

    Args:
        loss: the scalar that the function returns.
        data: the datums; their `logprobs` count as the old policy, `ref_logprobs` (else `teacher_logprobs`) as the
            reference.
        logprobs_list: as the SDK hands them to the loss.
        beta: the coefficient that the KL is meant to have.
        means: the divergence that is meant.
        more: further arguments of `klamp.check`: clip, kl_in, save, once, ...

    Raises:
        DataError, ShapeError, NonFiniteError, EmptyMaskError: as `compute_grpo_kl_loss`.
    """
    rows = read_rows(data)
    anchor = rows.teacher_logprobs if rows.ref_logprobs is None else rows.ref_logprobs
    given = {"mask": rows.mask, "old_logprobs": rows.logprobs, "advantages": rows.advantages, "ref_logprobs": anchor}
    lists: dict[str, Any] = {
        name: [row[:length] for row, length in zip(x, rows.lengths, strict=True)]
        for name, x in given.items()
        if x is not None
    }
    return check_loss(loss, policy_logprobs=list(logprobs_list), beta=beta, means=means, host="tinker", **lists, **more)
