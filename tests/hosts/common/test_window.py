"""The metrics of a step against the same tokens at once, and what comes of an empty one."""

from __future__ import annotations

import pytest
import torch

from klamp.core.estimators import kl_estimate
from klamp.core.term import KLTerm
from klamp.core.types import Batch
from klamp.hosts.common.rollout import Alone
from klamp.hosts.common.window import Window


def batch(rows: slice, *, length: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(1)
    policy, ref = (-torch.rand(6, length, generator=generator) for _ in range(2))
    mask = torch.rand(6, length, generator=generator) < 0.7
    return Batch(policy_logprobs=policy[rows], ref_logprobs=ref[rows], mask=mask[rows], advantages=torch.zeros(6)[rows])


def test_uneven_parts_add_up_to_the_whole() -> None:
    window, whole = Window(), batch(slice(0, 6))
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        window.add(batch(part), KLTerm(max_log_ratio=0.3), None)
    found = window.emit(Alone())
    delta = (whole.policy_logprobs - whole.ref_logprobs)[whole.mask]
    k3 = kl_estimate(whole.policy_logprobs, whole.ref_logprobs, estimator="k3")
    assert found["kl/k1"] == pytest.approx(float(delta.mean()), rel=1e-5)
    assert found["kl/k3"] == pytest.approx(float(k3[whole.mask].mean()), rel=1e-5)
    assert found["kl/k3_sequence"] == pytest.approx(float((k3 * whole.mask).sum(-1).mean()), rel=1e-5)
    assert found["kl/log_ratio_max"] == pytest.approx(float(delta.abs().max()))
    rank = int(0.99 * len(delta))
    assert found["kl/log_ratio_p99"] == pytest.approx(float(delta.abs().sort().values[rank]))
    assert found["kl/log_ratio_clamped"] == pytest.approx(float((delta.abs() > 0.3).float().mean()), rel=1e-5)
    assert found["length/mean"] == pytest.approx(float(whole.mask.sum(-1).float().mean()))
    assert window.emit(Alone()) == {}
